"""A sweep of a command line: the loop does a list of runs or a search, Hydra calls for the runs of others; then a report."""

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
from ..records.read import optimized
from . import folder
from .diagnose import Diagnosis
from .loop import TIMING_MISSED, Loop
from .plans import Job, Record, RunFailed, search_of
from .process import start_server


def run_sweep(line: CommandLine, sweep_dir: Path) -> None:
    """Run every job of a command line, each in its own process, and report on them.

    Those that are known beforehand and run here are done as they were composed and checked. Hydra composes the others, and
    may call for them in other processes.

    Raises:
        SystemExit: 1 if a run failed for another reason than memory; 129, 130 or 143 if a signal ended the sweep.
        UserError: if the folder holds another sweep, it or the report cannot be written, or the launcher fails.
    """
    folder.refuse_other(sweep_dir, line.configs if line.labels else [])
    sweep = Sweep(sweep_dir, line)
    exit_on_signals()
    with folder.lock_sweep_dir(sweep_dir):
        try:
            if sweep.here and any(ranks_asked(config) == 1 for config in line.configs):
                start_server()
                with contextlib.suppress(ImportError):  # for the report: it takes seconds, and disturbs no run now
                    importlib.import_module("..analysis.write", __package__)
            if line.labels and sweep.here:
                sweep.run_list(line.configs, line.compositions)
            else:
                words = [*words_for_hydra(line.words), *search_path()]
                words.append(as_override("hydra.sweep.dir", str(sweep_dir)))
                try:
                    _hydra.multirun(CONFIGS, words, sweep.run_job)
                except RunFailed:  # which ends a sweeper that searches; it has been reported
                    pass
                except Exception as error:
                    if sweep.here or isinstance(error, UserError):
                        raise
                    lost = f"hydra/launcher: {in_one_line(error)}"  # such as a job that it has lost
                    raise WriteError(lost) from error
            sweep.report()
            if sweep.exit_code and {*folder.statuses(sweep_dir)} & {*folder.UNFINISHED}:
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

    Each has a label; there are no labels where it is not known beforehand what will be run. `here` says whether this
    process starts all runs: some launchers call for them in other processes, and not in order.
    """

    def __init__(self, sweep_dir: Path, line: CommandLine):
        self.sweep_dir, self.labels = sweep_dir, line.labels
        self.loop = Loop()
        self.here = line.launcher["_target_"].endswith(".BasicLauncher")
        self._search, self._failed = search_of(line.configs[0]), False  # a search is one job
        may_share = self.here and self.labels and isinstance(self._search, Diagnosis | None)
        if not may_share and any(config.get("timing") is True for config in line.configs):
            warn(TIMING_MISSED)
        options = flatten(to_plain(line.compositions[0].hydra.sweeper))
        # Whether the same command line would draw other values.
        self._draws_anew = any(name.rpartition(".")[2] == "seed" and value is None for name, value in options)

    def run_list(self, configs: Sequence[dict[str, Any]], compositions: Sequence[DictConfig]) -> None:
        """Do runs that are known beforehand, as Hydra composed them."""
        jobs = []
        for number, (config, composition) in enumerate(zip(configs, compositions, strict=True)):
            place = (self.sweep_dir / str(number)).absolute()
            jobs.append(self._job(number, place, composition, composition.hydra, config))
        if self._search:
            with env_override(dict(jobs[0].environ)):  # which say what devices there are
                self._do(jobs[0])
        else:
            self.loop.do(jobs)

    def run_job(self, config: DictConfig) -> float | None:
        """What Hydra calls for each run; returns the metric that `optimized_metric` names.

        A failure raises RunFailed for a searching sweeper. A list of runs continues with the next.
        """
        hydra = HydraConfig.get()
        job = self._job(int(hydra.job.num), Path(hydra.runtime.output_dir), config, hydra)
        record = self._do(job)
        if record is None:  # of a search
            return None
        value = optimized(record) if record["status"] == "finished" else None
        if value is None and not self.labels:  # a searching sweeper needs a value of each run
            if record["status"] == "finished":
                name, has = job.config["optimized_metric"], ", ".join(record.get("metrics", {})) or "no metric"
                report(UserError(f"optimized_metric: got '{name}', and {relative(job.run_dir)} has {has}"))
                self._failed = True
            raise RunFailed.of(job, record)
        return value

    def _job(
        self, number: int, run_dir: Path, composition: DictConfig, hydra: Any, config: dict[str, Any] | None = None
    ) -> Job:
        """A run with its number in the sweep; `hydra` is Hydra's section of its composition, `config` is checked."""
        known = number < len(self.labels)
        title = f"{number + 1} of {len(self.labels)}" if known else f"{number + 1}"
        label = self.labels[number] if known else " ".join(hydra.overrides.task)
        environ = dict(hydra.job.env_set)
        forks = self.here and not environ  # libraries read their variables when they are imported
        job = Job.composed(run_dir, composition, hydra, f"run {title}: {label}", config)
        return replace(job, forks=forks, environ=environ)

    def _do(self, job: Job) -> Record | None:
        """Do one run, and return its record; or the runs of a search, which an error ends."""
        if self._search is None:
            return self.loop.do([job])[0]
        try:
            self.loop.run(self._search.plan(job))
        except UserError as error:
            report(error)
            self._failed = True
        return None

    def report(self) -> None:
        """Write and print the table and the recommendation; they can be made again from the sweep's folder."""
        if set(folder.statuses(self.sweep_dir)) <= {"planned"}:  # to import what writes a report takes seconds
            return
        from ..analysis.write import write_report  # matplotlib takes a second to import

        print(f"\n{write_report([self.sweep_dir], self.sweep_dir / 'report').printed}", flush=True)

    def print_resume(self) -> None:
        """After an interruption: the command that resumes the sweep."""
        if self._draws_anew:
            has_seed = "a search can be resumed if it has hydra.sweeper.sampler.seed=0"
            print(f"\nkept     {self.sweep_dir}; {has_seed}", flush=True)
            return
        line = [word for word in self.loop.command if not word.lstrip("+").startswith("hydra.sweep.dir=")]
        line.append(as_override("hydra.sweep.dir", str(self.sweep_dir)))
        print(f"\nresume   {command_line(line)}", flush=True)

    @property
    def exit_code(self) -> int:
        """1 if a run was refused or failed for another reason than memory; of a search, if it failed or no run finished."""
        if self._failed or self.loop.refused:
            return 1
        ends = folder.statuses(self.sweep_dir)
        return int("finished" not in ends if self._search else any(end not in folder.KEPT for end in ends))
