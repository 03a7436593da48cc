"""`experiment=diagnose`: a baseline, each change that may help alone, the two best together, and the baseline again.

Every run is a run of a sweep: in a process of its own, in a folder of its own, and kept when the diagnosis is started
again. Hydra starts a diagnosis as a sweep of one job.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..analysis.diagnose import AGAIN, BASELINE, CHANGE, TOGETHER, Trial, best_pair, find_findings, write_diagnosis
from ..analysis.run import Run
from ..checkpointing.resume import with_run_dir
from ..errors import UserError
from ..options.check import check_config
from ..options.command_lines import program
from ..options.compose import apply_overrides
from ..options.purpose import purpose_of
from ..options.types import Purpose
from ..records.rates import RATE
from ..records.terminal import wrapped
from .changes import Change, changes_to_try, fixed_options, this_machine
from .runner import RunFailed, SweepRunner
from .search import Diagnosis

NAME = "diagnose"  # of the experiment
_MULTIRUN = "--multirun"


class DiagnosisRunner(SweepRunner):
    """The runs of one diagnosis."""

    def __init__(self, sweep_dir: Path, labels: list[str]):
        super().__init__(sweep_dir, ["the diagnosis"])
        self.command = [word for word in self.command if word != _MULTIRUN]  # which the user has not written

    @override
    def search(self, number: int, run_dir: Path, config: dict[str, Any], facts: dict[str, Any]) -> None:
        """Do the runs of a diagnosis.

        Raises:
            RunFailed: if the baseline did not finish.
            UserError: if the baseline has no rate.
        """
        runs = _Runs(self, run_dir, config, facts)
        baseline = Run(BASELINE, run_dir, runs.do(BASELINE, Change({})))
        if RATE not in baseline.values:
            place = os.path.relpath(run_dir / BASELINE)
            raise UserError(
                f"experiment={NAME}: needs the rate of a run, and {place} has none; leave callbacks.throughput on"
            )
        machine = this_machine(str(baseline.record["hardware"]["device"]))
        fixed = fixed_options(facts["overrides"], facts["choices"])
        asked = Diagnosis(**{key: value for key, value in config["search"].items() if key != "_target_"})
        changes, not_tried = changes_to_try(config, baseline, machine, fixed, asked.batch_factors)
        print("\n".join(["", *wrapped(not_tried)]), flush=True)
        runs.expected = len(changes) + 3
        for change in changes:
            runs.try_out(CHANGE, change, not_tried=not_tried)
        best = [trial.options for trial in best_pair(find_findings(run_dir))]
        pair = [change for change in changes if tuple(change.overrides) in best]
        if len(pair) == 2:
            runs.try_out(TOGETHER, pair[0] | pair[1])
        runs.try_out(AGAIN, Change({}), not_tried=not_tried)

    @override
    def report(self) -> None:
        """Write and print the table, which is made from the records in the folder alone."""
        try:
            text = write_diagnosis(self.sweep_dir, self._command_with)
        except UserError:  # no run left a record: what went wrong has been said
            return
        print(f"\n{text}", flush=True)

    def _command_with(self, trial: Trial) -> str:
        return command_with(self.command, trial.options, trial.run.record["config"])

    @property
    @override
    def exit_code(self) -> int:
        """1 if the baseline was not measured; a change that is refused is a result."""
        return int(self.refused or not _has_baseline(self.sweep_dir))


class _Runs:
    """The runs of a diagnosis, one after the other."""

    def __init__(self, runner: SweepRunner, run_dir: Path, config: dict[str, Any], facts: dict[str, Any]):
        self.runner, self.run_dir, self.config, self.facts = runner, run_dir, config, facts
        self.expected = 0  # how many there will be at most; 0 until that is known
        self.done = 0

    def do(self, role: str, change: Change, **known: Any) -> dict[str, Any]:
        """The record of a run with a change; RunFailed if it did not finish."""
        self.done += 1
        of_all = f" of at most {self.expected}" if self.expected else ""
        title = f"run {self.done}{of_all}: {' '.join(change.overrides) or role.replace('_', ' ')}"
        name = change.folder or role
        config = check_config(apply_overrides(self.config, change.overrides))
        config = with_run_dir(config, config["run_dir"], os.path.join(config["run_dir"], name))
        facts = {**self.facts, "overrides": [*self.facts["overrides"], *change.overrides]}
        facts["diagnosis"] = {"role": role, "options": change.overrides, **known}
        return self.runner.run(title, self.run_dir / name, config, facts)

    def try_out(self, role: str, change: Change, **known: Any) -> None:
        """The same for a run whose failure is a result."""
        try:
            self.do(role, change, **known)
        except RunFailed:  # it has been printed, and is in the table
            return


def report_again(folder: Path, out: Path | None) -> str:
    """Write the report of a diagnosis that has ended; the text for the terminal.

    The program is the one that runs now, and not what a record says.
    """

    def command(trial: Trial) -> str:
        words = trial.run.record.get("overrides")
        return command_with(
            [*program(), *(map(str, words) if isinstance(words, list) else ())], [], trial.run.record["config"]
        )

    return write_diagnosis(folder, command, out)


def command_with(command: Sequence[str], options: Sequence[str], config: Mapping[str, Any]) -> str:
    """A diagnosis's command line → the line that trains with changed options; for a shell.

    What belongs to the diagnosis alone is left out: the experiment, the length of its runs, its folder.
    """
    words = []
    for word in command:
        name, _, value = word.lstrip("+").partition("=")
        if name == "experiment":
            others = [one.strip() for one in value.strip("[]").split(",") if one.strip() != NAME]
            words += [
                f"experiment=[{','.join(others)}]" if len(others) > 1 else f"experiment={one}" for one in others[:1]
            ]
        elif not _is_of_diagnosis(name, config):
            words.append(word)
    return shlex.join([*words, *options])


def _is_of_diagnosis(name: str, config: Mapping[str, Any]) -> bool:
    section, dot, _ = name.partition(".")
    return section in ("search", "hydra") or (bool(dot) and purpose_of(name, config) is Purpose.LENGTH)


def _has_baseline(sweep_dir: Path) -> bool:
    try:
        return bool(find_findings(sweep_dir).baselines)
    except UserError:
        return False
