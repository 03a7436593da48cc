"""A sweep of a command line: the loop does a list of runs, Hydra calls for those of other sweeps; then a report."""

import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from omegaconf import DictConfig

from ..checkpointing.signals import exit_on_signals
from ..errors import UserError, report, warn
from ..files import WriteError
from ..options.compose import config_in
from ..options.overrides import as_override
from ..options.update import ranks_asked
from ..records.read import optimized
from . import folder, launchers
from .grow_batch import grow_batch
from .loop import Loop
from .plans import Job, Plan, RunFailed
from .process import start_server
from .search import Diagnosis, TimeToTarget, search_of
from .time_to_target import time_to_target


def run_sweep(
    sweep_dir: Path,
    configs: list[dict[str, Any]],
    labels: list[str],
    launcher: Mapping[str, Any],
    start: Callable[["SweepRunner"], None],
) -> None:
    """Run every job of a sweep, each in its own process, and report on them.

    The labels say what sets each run apart; they are empty where a searching sweeper decides which runs there are.
    `start` gives the runner its runs.

    Raises:
        SystemExit: 1 if a run failed for another reason than memory; 129, 130 or 143 if a signal ended the sweep.
        UserError: if the folder holds another sweep or cannot be written, or a launcher lost a job.
    """
    folder.refuse_other(sweep_dir, configs if labels else [])
    here = launchers.is_basic(launcher)
    sweep = SweepRunner(sweep_dir, labels, here, next(filter(None, map(search_of, configs)), None))
    exit_on_signals()
    with folder.lock_sweep_dir(sweep_dir):
        try:
            if here and any(ranks_asked(config) == 1 for config in configs):
                start_server()
                with contextlib.suppress(ImportError):  # for the report: it takes seconds, and disturbs no run now
                    importlib.import_module("..analysis.report", __package__)
            with contextlib.suppress(RunFailed):  # which ends a sweeper that searches; it has been reported
                start(sweep)
        except BaseException as error:
            is_job_error = launchers.is_job_error(error)
            is_closed = isinstance(error, BrokenPipeError)  # standard output, as by `… | head`
            if not is_job_error and not is_closed and not isinstance(error, SystemExit | WriteError):
                raise
            with contextlib.redirect_stdout(sys.stderr if is_closed else sys.stdout):
                sweep.report()
                sweep.print_remaining()
            if is_job_error:
                raise UserError(f"hydra/launcher: {str(error).strip().partition(chr(10))[0]}") from error
            raise
        sweep.report()
    if sweep.exit_code:
        sys.exit(sweep.exit_code)


class SweepRunner:
    """The runs of one command line.

    Each has a label; there are no labels where it is not known beforehand what will be run. `here` says whether this
    process starts all runs: some launchers call for them in other processes, and not in order.
    """

    def __init__(self, sweep_dir: Path, labels: list[str], here: bool = False, search: object = None):
        self.sweep_dir = sweep_dir
        self.labels = ["the diagnosis"] if isinstance(search, Diagnosis) else labels
        self.loop = Loop()
        self._failure_is_result = isinstance(search, Diagnosis | TimeToTarget)
        self._is_diagnosis = isinstance(search, Diagnosis)
        self._here = here
        self._failed = False

    def run_list(self, compositions: Sequence[DictConfig]) -> None:
        """Do runs that are known beforehand, as Hydra composed them. The searches among them come first."""
        jobs = []
        for number, composition in enumerate(compositions):
            with env_override(dict(composition.hydra.job.env_set)):
                job = self._job(number, (self.sweep_dir / str(number)).absolute(), composition, composition.hydra)
                if job.forks and not job.config["search"]:
                    jobs.append(job)
                    continue
                with self._reported():
                    self._do(job)
        self.loop.do(jobs)

    def run_job(self, config: DictConfig) -> float | None:
        """What Hydra calls for each run; returns the metric that `optimized_metric` names, or what a search returns.

        A failure raises RunFailed for a searching sweeper. A list of runs continues with the next.
        """
        hydra = HydraConfig.get()
        with self._reported():
            return self._do(self._job(int(hydra.job.num), Path(hydra.runtime.output_dir), config, hydra))
        return None

    def _job(self, number: int, run_dir: Path, config: DictConfig, hydra: Any) -> Job:
        """A run with its number in the sweep; `hydra` is Hydra's section of its composition."""
        overrides = list(hydra.overrides.task)
        known = number < len(self.labels)
        title = f"{number + 1} of {len(self.labels)}" if known else f"{number + 1}"
        label = self.labels[number] if known else " ".join(overrides)
        facts = {"choices": dict(hydra.runtime.choices), "overrides": overrides}
        forks = self._here and not hydra.job.env_set  # libraries read their variables when they are imported
        return Job(run_dir, config_in(os.path.relpath(run_dir), config), facts, f"run {title}: {label}", forks=forks)

    def _do(self, job: Job) -> float | None:
        """Do a run, or the search that it asks for; see `run_job`."""
        if job.config["search"]:
            name = job.title.partition(":")[0].replace("run", "search")
            return self.loop.run(_search(job, f"{name}, " if len(self.labels) > 1 else ""))
        (record,) = self.loop.do([job])
        if record["status"] != "finished":
            raise RunFailed.of(job, record)
        return optimized(record)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Print the error that ends a run within; for a sweeper that searches raise RunFailed.

        A record says how its run ended. In a diagnosis and in time_to_target an error ends the whole search.
        """
        try:
            yield
        except UserError as error:
            report(error)
            self._failed |= self._failure_is_result or not isinstance(error, RunFailed)
            if not self.labels:
                raise RunFailed(str(error)) from error

    def report(self) -> None:
        """Write and print the table and the recommendation; they can be made again from the sweep's folder."""
        if set(folder.statuses(self.sweep_dir)) <= {"planned"}:  # to import what writes a report takes seconds
            return
        with contextlib.suppress(UserError):  # no run left a record: what went wrong has been said
            print(f"\n{self._written_report()}", flush=True)

    def _written_report(self) -> str:
        if self._is_diagnosis:
            from ..analysis.diagnose import find_findings

            return find_findings(self.sweep_dir).text
        from ..analysis.report import analyse, write_report  # matplotlib takes a second to import

        try:
            return write_report([self.sweep_dir], self.sweep_dir / "report").printed
        except UserError as error:  # its files cannot be written
            text = analyse([self.sweep_dir]).text
            warn(str(error))
            self._failed = True
            return text

    def print_remaining(self) -> None:
        """After an interruption: which runs were stopped, which never began, and the command that resumes the sweep."""
        stopped, not_run = [], []
        for number, label in enumerate(self.labels):
            run_dir = self.sweep_dir / str(number)
            if {*folder.statuses(run_dir)} & {*folder.UNFINISHED}:
                stopped.append(label)
            elif not folder.has_ended(run_dir):
                not_run.append(label)
        print()
        for word, runs in (("stopped", stopped), ("not run", not_run)):
            if runs:
                print(f"{word}  {len(runs)} of {len(self.labels)}: {' · '.join(runs)}")
        line = [word for word in self.loop.command if not word.lstrip("+").startswith("hydra.sweep.dir=")]
        line.append(as_override("hydra.sweep.dir", str(self.sweep_dir)))
        print(f"resume   {shlex.join(line)}", flush=True)

    @property
    def exit_code(self) -> int:
        """1 if a run was refused or failed for another reason than memory, or the report cannot be written.

        For a diagnosis or time_to_target, 1 only if no run finished or one failure ended the search.
        """
        if self._failed or self.loop.refused:
            return 1
        ends = folder.statuses(self.sweep_dir)
        return int("finished" not in ends if self._failure_is_result else any(end not in folder.KEPT for end in ends))


def _search(job: Job, of_job: str) -> Plan[float | None]:
    search = search_of(job.config)
    if isinstance(search, TimeToTarget):
        return time_to_target(job, search, of_job)
    if not isinstance(search, Diagnosis):
        return grow_batch(job, search, of_job)
    from .diagnose import diagnose  # brings matplotlib, which takes a second to import

    return diagnose(job, search)
