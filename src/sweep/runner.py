"""A sweep of a command line: Hydra calls for its runs, the loop does them, and a report follows."""

import contextlib
import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ..checkpointing.signals import exit_on_signals
from ..errors import UserError, report
from ..files import WriteError
from ..options.check import check_config
from ..options.command_lines import program
from ..options.overrides import as_override
from ..records.read import optimized
from . import folder, launchers
from .fork_server import forking
from .loop import Loop
from .plans import Job, Plan, RunFailed, is_one_process
from .search import grow_batch, is_diagnosis

HydraJob = Callable[[DictConfig], float | None]  # what Hydra calls for each run


def run_sweep(
    sweep_dir: Path,
    configs: list[dict[str, Any]],
    labels: list[str],
    launcher: Mapping[str, Any],
    start_hydra: Callable[[HydraJob], None],
) -> None:
    """Run every job of a sweep, each in its own process, and report on them.

    The labels say what sets each run apart; they are empty where a searching sweeper decides which runs there are.

    Raises:
        SystemExit: 1 if a run failed for another reason than memory; 129, 130 or 143 if a signal ended the sweep.
        UserError: if the folder holds another sweep or cannot be written, or a launcher lost a job.
    """
    folder.refuse_other(sweep_dir, configs if labels else [])
    sweep = SweepRunner(sweep_dir, labels, any(map(is_diagnosis, configs)))
    exit_on_signals()
    if output := launchers.output_folder(launcher):
        print(f"the runs are jobs, and write their output to {output}", flush=True)
    with folder.lock_sweep_dir(sweep_dir):
        try:
            # A list of runs continues after one that failed; it has been reported, and is in the table.
            with sweep.starting_here(configs, launcher), contextlib.suppress(RunFailed):
                start_hydra(sweep.run_job)
                sweep.loop.run(listed(sweep.waiting))
        except BaseException as error:
            is_job_error = launchers.is_job_error(error)
            if not is_job_error and not isinstance(error, SystemExit | WriteError):
                raise
            sweep.report()
            sweep.print_remaining()
            if is_job_error:
                raise UserError(f"hydra/launcher: {str(error).strip().partition(chr(10))[0]}") from error
            raise
        sweep.report()
    if sweep.exit_code:
        sys.exit(sweep.exit_code)


def listed(jobs: Sequence[Job]) -> Plan[None]:
    """All runs of a command line."""
    if jobs:
        yield jobs


class SweepRunner:
    """The runs of one command line. Some launchers call for them in other processes, and not in order.

    Args:
        sweep_dir: holds a folder a run.
        labels: what sets each run apart; empty where it is not known beforehand what will be run.
        diagnosis: whether the command line is that of one diagnosis, for Hydra a sweep of one job.
    """

    def __init__(self, sweep_dir: Path, labels: list[str], diagnosis: bool = False):
        self.sweep_dir = sweep_dir
        self.labels = ["the diagnosis"] if diagnosis else labels
        self.command = [*program(), *sys.argv[1:]]
        self.loop = Loop(self.command)
        self.waiting: list[Job] = []  # for the end of Hydra's list: their results go to nobody before
        self._is_diagnosis = diagnosis
        self._here = False  # whether Hydra calls for all runs in this process
        self._refused = False

    @contextlib.contextmanager
    def starting_here(self, configs: list[dict[str, Any]], launcher: Mapping[str, Any]) -> Iterator[None]:
        """Fork the runs from a server that imports while this process composes the first run."""
        self._here = launchers.is_basic(launcher)
        left = not self.labels or not all(folder.has_ended(self.sweep_dir / str(n)) for n in range(len(self.labels)))
        needed = any(map(is_one_process, configs)) and (left or any(config["search"] for config in configs))
        with forking(needed and self._here) as server:
            self.loop = Loop(self.command, server)
            if server is not None:
                with contextlib.suppress(ImportError):  # for the report: it takes seconds, and disturbs no run now
                    importlib.import_module("..analysis.report", __package__)
            yield
        self._refused |= self.loop.refused

    def run_job(self, config: DictConfig) -> float | None:
        """What Hydra calls for each run: does it, unless it may wait until Hydra has called for all.

        Returns the metric that `optimized_metric` names; of a search, the batch size that it found.

        Raises:
            RunFailed: so that a searching sweeper knows. A list of runs continues with the next, and returns None.
        """
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        config.run_dir = os.path.relpath(run_dir)
        overrides, number = list(hydra.overrides.task), int(hydra.job.num)
        facts = {"choices": dict(hydra.runtime.choices), "overrides": overrides}
        known = number < len(self.labels)
        title = f"{number + 1} of {len(self.labels)}" if known else f"{number + 1}"
        label = self.labels[number] if known else " ".join(overrides)
        try:
            plain = check_config(config)
            job = Job(run_dir, plain, facts, f"run {title}: {label}")
            if plain["search"]:
                return self.loop.run(self._search(job, f"search {title}, " if len(self.labels) > 1 else ""))
            if self._here and self.labels and not hydra.job.env_set:
                self.waiting.append(job)
                with contextlib.suppress(
                    OSError
                ):  # Hydra's empty folder: without one, a run that never begins leaves no note
                    run_dir.rmdir()
                return None
            (record,) = self.loop.do([job])
            if record["status"] != "finished":
                raise RunFailed(f"{run_dir}: {record.get('error') or record['status']}")
            return optimized(record)
        except UserError as error:
            report(error)
            self._refused |= not isinstance(error, RunFailed)
            if self.labels:
                return None
            raise RunFailed(str(error)) from error

    def _search(self, job: Job, of_job: str) -> Plan[float | None]:
        if not self._is_diagnosis:
            return grow_batch(job, of_job)
        from .diagnose import diagnose  # brings matplotlib, which takes a second to import

        return diagnose(job)

    def report(self) -> None:
        """Write and print the table and the recommendation; they can be made again from the sweep's folder."""
        with contextlib.suppress(UserError):  # no run left a record: what went wrong has been said
            print(f"\n{self._written_report()}", flush=True)

    def _written_report(self) -> str:
        if self._is_diagnosis:
            from .diagnose import report_of_command

            return report_of_command(self.sweep_dir, self.command)
        from ..analysis import write_report  # matplotlib takes a second to import

        try:
            return write_report([self.sweep_dir], self.sweep_dir / "report").printed
        except (
            UserError
        ) as error:  # where its files cannot be written, they are written elsewhere, and the text is printed
            with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as elsewhere:
                text = write_report([self.sweep_dir], elsewhere).text
                print(f"warning: {error}", file=sys.stderr, flush=True)
                return text
            raise

    def print_remaining(self) -> None:
        """After an interruption: which runs were stopped, which never began, and the command that resumes the sweep."""
        stopped, not_run = [], []
        for number, label in enumerate(self.labels):
            run_dir = self.sweep_dir / str(number)
            if folder.was_stopped(run_dir):
                then = "continues from its checkpoint" if folder.has_checkpoint(run_dir) else "begins anew"
                stopped.append(f"{label}, which {then}")
            elif not folder.has_ended(run_dir):
                not_run.append(label)
        print()
        for word, found in (("stopped", stopped), ("not run", not_run)):
            if found:
                print(f"{word}  {len(found)} of {len(self.labels)}: {' · '.join(found)}")
        line = [word for word in self.command if not word.lstrip("+").startswith("hydra.sweep.dir=")]
        line.append(as_override("hydra.sweep.dir", str(self.sweep_dir)))
        print(f"resume   {shlex.join(line)}", flush=True)

    @property
    def exit_code(self) -> int:
        """1 if a run failed for another reason than memory, or was refused; of a diagnosis, if it has no baseline."""
        if self._is_diagnosis:
            from .diagnose import has_baseline

            return int(self._refused or not has_baseline(self.sweep_dir))
        return int(self._refused or any(status not in folder.KEPT for status in folder.statuses(self.sweep_dir)))
