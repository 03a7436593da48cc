"""A sweep of a command line, with its report. The loop does a list of runs or a search; Hydra starts all other runs."""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from omegaconf import DictConfig

from .. import _hydra
from .._system import command_line, relative
from ..checkpointing.signals import exit_on_signals
from ..errors import UserError, in_one_line, report, warn
from ..files import WriteError
from ..options.compose import CommandLine, search_path, words_for_hydra
from ..options.groups import CONFIGS, to_plain
from ..options.overrides import as_override
from ..options.ranks import ranks_asked
from ..options.tree import flatten
from ..records.read import optimized_value
from . import folder
from .diagnose import Diagnosis
from .loop import TIMING_MISSED, Loop
from .plans import Job, Record, RunFailed, build_search
from .process import start_server


def run_sweep(line: CommandLine, sweep_dir: Path) -> None:
    """Do every run of a command line, each in its own process, and write the report.

    Listed runs that this process starts have the configurations that were composed and checked before. Hydra composes
    the other runs, and may start them from other processes.

    Raises:
        SystemExit: 1 if a run failed for another reason than memory; 129, 130 or 143 if a signal ended the sweep.
        UserError: if the folder holds another sweep, the folder or the report cannot be written, or the launcher fails.
    """
    folder.refuse_other_sweep(sweep_dir, line.configs if line.labels else [])
    sweep = Sweep(sweep_dir, line)
    exit_on_signals()
    with folder.lock_sweep_dir(sweep_dir):
        try:
            if sweep.is_local and any(ranks_asked(config) == 1 for config in line.configs):
                start_server()
                with contextlib.suppress(ImportError):  # for the report: it takes seconds, and disturbs no run yet
                    importlib.import_module("..analysis.write", __package__)
            if line.labels and sweep.is_local:
                sweep.run_list(line.configs, line.compositions)
            else:
                words = [*words_for_hydra(line.words), *search_path()]
                words.append(as_override("hydra.sweep.dir", str(sweep_dir)))
                try:
                    _hydra.multirun(CONFIGS, words, sweep.run_job)
                except RunFailed:  # it ends a searching sweeper, and has been reported
                    pass
                except Exception as error:
                    if sweep.is_local or isinstance(error, UserError):
                        raise
                    raise WriteError(f"hydra/launcher: {in_one_line(error)}") from error  # such as a lost job
            sweep.report()
            if sweep.exit_code and {*folder.statuses(sweep_dir)} & {*folder.UNFINISHED_STATUSES}:
                sweep.print_resume()
        except (SystemExit, WriteError):
            try:
                with contextlib.suppress(UserError):
                    sweep.report()
            finally:
                sweep.print_resume()
            raise
    if sweep.exit_code:
        sys.exit(sweep.exit_code)


class Sweep:
    """The runs of one command line.

    Each listed run has a label; there are no labels if a sweeper decides later what to run. `is_local` says whether
    this process starts all runs: some launchers start them from other processes, and not in order.
    """

    def __init__(self, sweep_dir: Path, line: CommandLine):
        self.sweep_dir, self.labels = sweep_dir, line.labels
        self.loop = Loop()
        self.is_local = line.launcher["_target_"].endswith(".BasicLauncher")
        self._search, self._search_failed = build_search(line.configs[0]), False  # a search is one job
        may_share_passes = self.is_local and self.labels and isinstance(self._search, Diagnosis | None)
        if not may_share_passes and any(config.get("timing") is True for config in line.configs):
            warn(TIMING_MISSED)
        options = flatten(to_plain(line.compositions[0].hydra.sweeper))
        # Without a seed the same command line draws other values.
        self._is_unseeded = any(name.rpartition(".")[2] == "seed" and value is None for name, value in options)

    def run_list(self, configs: Sequence[dict[str, Any]], compositions: Sequence[DictConfig]) -> None:
        """Do the listed runs, as Hydra has composed them."""
        jobs = []
        for number, (config, composition) in enumerate(zip(configs, compositions, strict=True)):
            run_dir = (self.sweep_dir / str(number)).absolute()
            jobs.append(self._job(number, run_dir, composition, composition.hydra, config))
        if self._search:
            with env_override(dict(jobs[0].environ)):  # the variables may hide devices
                self._do(jobs[0])
        else:
            self.loop.do(jobs)

    def run_job(self, config: DictConfig) -> float | None:
        """Do a run for Hydra, and return the metric that `optimized_metric` names.

        After a failed run a list continues with the next run, and a searching sweeper gets RunFailed.
        """
        hydra = HydraConfig.get()
        job = self._job(int(hydra.job.num), Path(hydra.runtime.output_dir), config, hydra)
        record = self._do(job)
        if record is None:  # the job was a search
            return None
        value = optimized_value(record) if record["status"] == "finished" else None
        if value is None and not self.labels:  # a searching sweeper needs a value for each run
            if record["status"] == "finished":
                name, metrics = job.config["optimized_metric"], ", ".join(record.get("metrics", {})) or "no metric"
                report(UserError(f"optimized_metric: got '{name}', and {relative(job.run_dir)} has {metrics}"))
                self._search_failed = True
            raise RunFailed.from_record(job, record)
        return value

    def _job(
        self, number: int, run_dir: Path, composition: DictConfig, hydra: Any, config: dict[str, Any] | None = None
    ) -> Job:
        """Return a run's job; `hydra` is Hydra's section of the composition, `config` the checked configuration."""
        is_listed = number < len(self.labels)
        position = f"{number + 1} of {len(self.labels)}" if is_listed else f"{number + 1}"
        label = self.labels[number] if is_listed else " ".join(hydra.overrides.task)
        environ = dict(hydra.job.env_set)
        may_fork = self.is_local and not environ  # libraries read environment variables at their import
        job = Job.composed(run_dir, composition, hydra, f"run {position}: {label}", config)
        return replace(job, may_fork=may_fork, environ=environ)

    def _do(self, job: Job) -> Record | None:
        """Do one run and return its record, or do the runs of a search and return None. An error ends the search."""
        if self._search is None:
            return self.loop.do([job])[0]
        try:
            self.loop.run(self._search.plan(job))
        except UserError as error:
            report(error)
            self._search_failed = True
        return None

    def report(self) -> None:
        """Write and print the report, unless no run has begun; `batchscope report` can repeat it from the folder."""
        if set(folder.statuses(self.sweep_dir)) <= {"planned"}:
            return
        from ..analysis.write import write_report  # matplotlib takes a second to import

        print(f"\n{write_report([self.sweep_dir], self.sweep_dir / 'report').printed}", flush=True)

    def print_resume(self) -> None:
        """Print the command that resumes the sweep after an interruption."""
        if self._is_unseeded:
            hint = "a search can be resumed if it has hydra.sweeper.sampler.seed=0"
            print(f"\nkept     {self.sweep_dir}; {hint}", flush=True)
            return
        words = [word for word in self.loop.command if not word.lstrip("+").startswith("hydra.sweep.dir=")]
        words.append(as_override("hydra.sweep.dir", str(self.sweep_dir)))
        print(f"\nresume   {command_line(words)}", flush=True)

    @property
    def exit_code(self) -> int:
        """1 if a run was refused or failed, but for memory, or a search failed or none of its runs finished; else 0."""
        if self._search_failed or self.loop.has_refused:
            return 1
        statuses = folder.statuses(self.sweep_dir)
        if self._search:
            return int("finished" not in statuses)
        return int(any(status not in folder.KEPT_STATUSES for status in statuses))
