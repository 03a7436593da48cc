"""A sweep's runs as Hydra calls for them, and what is said at its end."""

import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ..checkpointing.resume import with_run_dir
from ..errors import UserError, printable, report
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import program, resume_command
from ..options.overrides import as_override
from ..records.rates import RATE
from ..records.read import optimized
from . import folder
from .process import run_in_subprocess
from .search import BatchSizeSearch


class RunFailed(UserError):
    """A run of a sweep that has ended without a result, and has said why."""

    def __init__(self, message: str, exit_code: int = 1, status: str = "failed"):
        super().__init__(message, exit_code)
        self.reported = True
        self.status = status  # of its record


class SweepRunner:
    """The runs of one command line, called one by one (by some launchers in processes of their own).

    Args:
        sweep_dir: where all of them lie.
        labels: what sets each run apart; empty where it is not known beforehand what will be run.
    """

    def __init__(self, sweep_dir: Path, labels: list[str]):
        self.sweep_dir = sweep_dir
        self.labels = labels
        self.expected = len(labels)
        self.took: list[float] = []  # seconds, of the runs that were not kept
        self.program = program()  # of this process; a launcher may call for runs in others
        self.command = [*self.program, *sys.argv[1:]]
        self.refused = False  # whether something was wrong that no run's record says

    def run_job(self, config: DictConfig) -> float | None:
        """What Hydra calls for each run: kept, or done in a process of its own.

        Returns:
            The metric that `optimized_metric` names; of a search, the batch size that it found.

        Raises:
            RunFailed: so that a searching sweeper knows. A list of runs goes on with the next, and returns None.
        """
        job = HydraConfig.get()
        run_dir = Path(job.runtime.output_dir)
        config.run_dir = os.path.relpath(run_dir)
        facts = {"choices": dict(job.runtime.choices), "overrides": list(job.overrides.task)}
        number = int(job.job.num)
        try:
            plain = check_config(config)
            if plain["search"]:
                return self._search(number, run_dir, plain, facts)
            known = self.expected > number
            where = f"run {number + 1}" + (f" of {self.expected}{self._left(number)}" if known else "")
            what = self.labels[number] if known else " ".join(facts["overrides"])
            return optimized(self._run(f"{where}: {what}", run_dir, plain, facts))
        except UserError as error:
            report(error)
            self.refused |= not isinstance(error, RunFailed)
            if self.labels:
                return None
            raise RunFailed(str(error)) from error

    def _run(self, what: str, run_dir: Path, config: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        """The record of a run that has ended well."""
        kept = folder.keep_or_plan(run_dir, config, command=shlex.join(self.command), **facts)
        print(f"\n— {what}{' — kept' if kept else ''}", flush=True)
        if kept is None:
            started = time.monotonic()
            record = run_in_subprocess(run_dir, trust.digest(config))
            self.took.append(time.monotonic() - started)
        else:
            record = kept
        if record["status"] != "finished":
            reason = str(record.get("error") or record["status"])
            print(printable(f"  {record['status'].replace('_', ' ')}: {reason}"), file=sys.stderr, flush=True)
            if kept and record["status"] == "failed":  # by itself: it would again
                place = os.path.relpath(run_dir)
                anew = shlex.join(["mv", place, f"{place}.aside"])
                print(
                    f"  to go on with it: {resume_command(config, Path(place), self.program)}\n"
                    f"  to have it run anew with the sweep: {anew}",
                    file=sys.stderr,
                    flush=True,
                )
            raise RunFailed(f"{run_dir}: {reason}", status=record["status"])
        return record

    def _left(self, number: int) -> str:
        """How long the rest takes if its runs take as long as those before."""
        if not self.took:
            return ""
        return f", about {_duration(statistics.mean(self.took) * (self.expected - number))} left"

    def _search(self, number: int, run_dir: Path, config: dict[str, Any], facts: dict[str, Any]) -> float | None:
        """Runs of growing batch sizes in folders below the job's own.

        Raises:
            RunFailed: if a run failed for another reason than memory, which says nothing about its size.
            UserError: if a run has no rate.
        """
        options = {key: value for key, value in config["search"].items() if key != "_target_"}
        search = BatchSizeSearch(**options)
        done: list[int] = []
        train_samples: list[int] = []  # for each process; empty until a run has said so

        def measure(batch_size: int) -> float | None:
            done.append(batch_size)
            of_job = f"search {number + 1} of {self.expected}, " if self.expected > 1 else ""
            what = f"{of_job}run {len(done)} of at most {search.max_runs}: data.batch_size={batch_size}"
            place = os.path.join(config["run_dir"], str(batch_size))
            one = with_run_dir(
                {**config, "data": {**config["data"], "batch_size": batch_size}}, config["run_dir"], place
            )
            known = {**facts, "overrides": [*facts["overrides"], f"data.batch_size={batch_size}"]}
            try:
                record = self._run(what, run_dir / str(batch_size), one, known)
            except RunFailed as failed:
                if failed.status == "out_of_memory":
                    return None
                print(
                    f"  the search ends: {failed.status} does not say whether the batch fits",
                    file=sys.stderr,
                    flush=True,
                )
                raise
            train_samples[:] = [max(1, record["dataset"]["train_samples"] // record.get("processes", 1))]
            if record["throughput"].get(RATE) is None:
                raise UserError(f"search: needs the rate of a run, and {place} has none; leave callbacks.throughput on")
            return record["throughput"][RATE]

        return search.find(measure, lambda: next(iter(train_samples), None))

    def report(self) -> None:
        """A sweep ends in its table and its recommendation; they can be made again from its folder."""
        from ..analysis import write_report

        try:
            text = write_report([self.sweep_dir], self.sweep_dir / "report").text
        except UserError as error:  # where its files cannot be written, it is made elsewhere, to be read here
            try:
                with tempfile.TemporaryDirectory() as elsewhere:
                    text = write_report([self.sweep_dir], elsewhere).text
            except (UserError, OSError):  # no run left a record: what went wrong has been said
                return
            print(f"warning: {error}", file=sys.stderr, flush=True)
        print(f"\n{text}", flush=True)

    def say_what_is_left(self) -> None:
        """After an interruption: what was not run, and how to go on."""
        left = [i for i in range(self.expected) if not _ended(self.sweep_dir / str(i))]
        if left:
            print(f"\nnot run  {len(left)} of {self.expected}: " + " · ".join(self.labels[i] for i in left))
        line = [word for word in self.command if not word.lstrip("+").startswith("hydra.sweep.dir=")]
        line.append(as_override("hydra.sweep.dir", str(self.sweep_dir)))
        print(f"go on    {shlex.join(line)}", flush=True)

    @property
    def exit_code(self) -> int:
        """1 if a run failed for another reason than memory, or was refused."""
        return int(self.refused or any(status not in folder.KEPT for status in folder.statuses(self.sweep_dir)))


def _ended(run_dir: Path) -> bool:
    found = folder.statuses(run_dir)
    return bool(found) and all(status in (*folder.KEPT, "failed") for status in found)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
