"""`experiment=diagnose`: a baseline, each change that may help alone, the two best together, and the baseline again.

Every run is a run of a sweep: in a process of its own, in a folder of its own, and kept when the diagnosis is started
again. Hydra starts a diagnosis as a sweep of one job.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.diagnose import AGAIN, BASELINE, CHANGE, TOGETHER, Trial, best_pair, find_findings, write_diagnosis
from ..analysis.run import Run
from ..errors import UserError
from ..options.command_lines import program
from ..options.purpose import purpose_of
from ..options.types import Purpose
from ..records.rates import RATE
from ..records.terminal import wrapped
from .changes import Change, changes_to_try, fixed_options, this_machine
from .plans import Job, Plan, RunFailed
from .search import Diagnosis

NAME = "diagnose"  # of the experiment


def diagnose(job: Job, search: Diagnosis) -> Plan[None]:
    """The runs of a diagnosis, in folders below the job's own.

    Raises:
        RunFailed: if the baseline did not finish.
        UserError: if the baseline has no rate.
    """
    done, at_most = 0, ""

    def changed(role: str, change: Change, **known: Any) -> Job:
        nonlocal done
        done += 1
        title = f"run {done}{at_most}: {' '.join(change.overrides) or role.replace('_', ' ')}"
        facts = {"role": role, "options": change.overrides, **known}
        return job.below(change.folder or role, change.options, title, diagnosis=facts)

    (record,) = yield [changed(BASELINE, Change({}))]
    if record["status"] != "finished":
        raise RunFailed(f"{job.run_dir}: {record.get('error') or record['status']}")
    baseline = Run(BASELINE, job.run_dir, record)
    if RATE not in baseline.values:
        place = os.path.relpath(job.run_dir / BASELINE)
        raise UserError(
            f"experiment={NAME}: needs the rate of a run, and {place} has none; leave callbacks.throughput on"
        )
    machine = this_machine(str(record["hardware"]["device"]))
    fixed = fixed_options(job.facts["overrides"])
    changes, not_tried = changes_to_try(job.config, baseline, machine, fixed, search.batch_factors)
    print("\n".join(["", *wrapped(not_tried)]), flush=True)
    at_most = f" of at most {len(changes) + 3}"
    for change in changes:  # one that is refused is a result, and in the table
        yield [changed(CHANGE, change, not_tried=not_tried)]
    best = [trial.options for trial in best_pair(find_findings(job.run_dir))]
    pair = [change for change in changes if tuple(change.overrides) in best]
    if len(pair) == 2:
        yield [changed(TOGETHER, pair[0] | pair[1])]
    yield [changed(AGAIN, Change({}), not_tried=not_tried)]


def write_report(folder: Path, out: Path | None = None) -> str:
    """Write the table of a diagnosis, from the records in its folder alone; the text for the terminal.

    Args:
        folder: of the diagnosis.
        out: is written to, instead of `report` in the folder.

    Raises:
        UserError: if no run has left a record.
    """

    def line(trial: Trial) -> str:
        record = trial.run.record
        try:
            words = shlex.split(str(record.get("command", "")))
        except ValueError:  # nobody has typed it
            words = []
        return command_with(words or program(), trial.options, record["config"])

    return write_diagnosis(folder, line, out)


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
