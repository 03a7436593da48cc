"""A sweep: its runs, one after the other as Hydra calls for them, and its report."""

import contextlib
import importlib
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ..checkpointing.resume import with_run_dir
from ..errors import UserError, printable, report
from ..files import WriteError
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import program, resume_command
from ..options.overrides import as_override
from ..records.formatting import duration, significant
from ..records.metrics import best_first, metric
from ..records.rates import MEAN_RATE, RATE
from ..records.read import optimized, read
from ..records.terminal import LiveLine, is_verbose
from ..records.values import at, positive
from . import folder, launchers, turn_processes
from .fork_server import ForkServer, forking
from .process import exit_on_signals, run_in_subprocess
from .search import BatchSizeSearch, recommended_in, undecided_in

_NOT_COMPARED = ("data.batch_size=", "seed=", "optimizer.")  # overrides
Job = Callable[[DictConfig], float | None]  # what Hydra calls for each run


class RunFailed(UserError):
    """A run of a sweep that has ended without a result, and has said why."""

    def __init__(self, message: str, exit_code: int = 1, status: str = "failed"):
        super().__init__(message, exit_code)
        self.reported = True
        self.status = status  # of its record


def run_sweep(
    sweep_dir: Path,
    configs: list[dict[str, Any]],
    labels: list[str],
    launcher: Mapping[str, Any],
    start_hydra: Callable[[Job], None],
    runner: "type[SweepRunner]",
) -> None:
    """Run every job of a sweep, each in its own process, and report on them.

    The labels say what sets each run apart; they are empty where a searching sweeper decides which runs there are.
    `runner` runs the jobs and reports on them.

    Raises:
        SystemExit: 1 if a run failed for another reason than memory; 129, 130 or 143 if a signal ended the sweep.
        UserError: if the folder holds another sweep or cannot be written, or a launcher lost a job.
    """
    folder.refuse_other(sweep_dir, configs if labels else [])
    sweep = runner(sweep_dir, labels)
    exit_on_signals()
    if output := launchers.output_folder(launcher):
        print(f"the runs are jobs, and write their output to {output}", flush=True)
    with folder.lock_sweep_dir(sweep_dir):
        try:
            # A list of runs continues after one that failed; it has been reported, and is in the table.
            with sweep.forking(configs, launcher), contextlib.suppress(RunFailed):
                start_hydra(sweep.run_job)
                sweep.run_in_turns()
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


class Waiting(NamedTuple):
    """A run that Hydra has called for."""

    number: int
    run_dir: Path
    config: dict[str, Any]
    facts: dict[str, Any]


class SweepRunner:
    """The runs of one command line. Some launchers call for them in other processes, and not in order."""

    def __init__(self, sweep_dir: Path, labels: list[str]):
        self.sweep_dir = sweep_dir
        self.labels = labels  # what sets each run apart; empty where it is not known beforehand what will be run
        self.expected = len(labels)
        self.durations: list[float] = []  # seconds, of the runs that were not kept
        self.command = [*program(), *sys.argv[1:]]  # of this process; a launcher may call for runs in others
        self.refused = False  # whether a job failed without a record that says so
        self._server: ForkServer | None = None
        self._in_turns: list[Waiting] = []

    @contextlib.contextmanager
    def forking(self, configs: list[dict[str, Any]], launcher: Mapping[str, Any]) -> Iterator[None]:
        """Fork the runs from a server that imports while this process composes the first run."""
        kept = [_has_ended(self.sweep_dir / str(number)) for number in range(self.expected)]
        needed = any(map(is_one_process, configs)) and (not kept or not all(kept) or any(c["search"] for c in configs))
        with forking(configs, wanted=needed and launchers.is_basic(launcher)) as self._server:
            if self._server is not None:
                with contextlib.suppress(ImportError):  # for the report: it takes seconds, and disturbs no run now
                    importlib.import_module("..analysis.report", __package__)
            yield
        self._server = None

    def run_job(self, config: DictConfig) -> float | None:
        """What Hydra calls for each run: a run that is kept, or that a subprocess does.

        Returns the metric that `optimized_metric` names; of a search, the batch size that it found.

        Raises:
            RunFailed: so that a searching sweeper knows. A list of runs continues with the next, and returns None.
        """
        job = HydraConfig.get()
        run_dir = Path(job.runtime.output_dir)
        config.run_dir = os.path.relpath(run_dir)
        facts = {"choices": dict(job.runtime.choices), "overrides": list(job.overrides.task)}
        number = int(job.job.num)
        try:
            plain = check_config(config)
            if plain["search"]:
                return self.search(number, run_dir, plain, facts)
            waiting = Waiting(number, run_dir, plain, facts)
            if self._takes_turns(plain, job.job.env_set):
                self._in_turns.append(waiting)
                return None
            return optimized(self.run(self._title(waiting), *waiting[1:]))
        except UserError as error:
            report(error)
            self.refused |= not isinstance(error, RunFailed)
            if self.labels:
                return None
            raise RunFailed(str(error)) from error

    def _title(self, run: Waiting) -> str:
        number = run.number
        if number >= self.expected:
            return f"run {number + 1}: {' '.join(run.facts['overrides'])}"
        left = ""
        if self.durations:  # if the remaining runs take as long as those before
            left = f", about {duration(statistics.mean(self.durations) * (self.expected - number))} left"
        return f"run {number + 1} of {self.expected}{left}: {self.labels[number]}"

    def _takes_turns(self, config: dict[str, Any], env_set: Mapping[str, Any]) -> bool:
        """Whether a run waits for the others; not where a searching sweeper waits for it."""
        forked = self._server is not None and is_one_process(config) and not env_set
        return forked and bool(self.labels) and turn_processes.is_suited(config)

    def run_in_turns(self) -> None:
        """The runs that wait for each other. What has ended before is kept; a single run needs no turns."""
        left = [one for one in self._in_turns if not _has_ended(one.run_dir)]
        for one in self._in_turns:
            if one not in left:
                with self._reported():
                    self.run(self._title(one), *one[1:])
        crowded: list[Waiting] = []  # out of memory while others waited: it may have been theirs
        while len(left) > 1 and self._server is not None:
            ended = self._run_group(left[: turn_processes.MOST_AT_ONCE])
            if not ended:  # the server cannot fork, now and later
                break
            group, left = (
                [one for one in left if one.run_dir in ended],
                [one for one in left if one.run_dir not in ended],
            )
            crowded += [one for one in group if len(group) > 1 and _ran_out_of_memory(one.run_dir)]
        for one in (*left, *crowded):
            with self._reported():
                if one in crowded:
                    folder.plan_again(one.run_dir, one.config, command=shlex.join(self.command), **one.facts)
                self.run(self._title(one), *one[1:])

    def _run_group(self, group: list[Waiting]) -> set[Path]:
        """Measure runs in passes; the folders of those that have ended."""
        assert self._server is not None
        jobs = []
        for one in group:
            with self._reported():
                folder.keep_or_plan(one.run_dir, one.config, command=shlex.join(self.command), **one.facts)
            jobs.append((one.run_dir, [trust.digest(one.config), str(one.run_dir)]))
        by_folder = {one.run_dir: one for one in group}
        line, warned = LiveLine(), set[str]()

        def tell(run: turn_processes.TurnRun) -> None:
            one = by_folder[run.folder]
            line.clear()
            self._relay(run.printed(), self._title(one), warned)
            with self._reported():
                self._check(read(one.run_dir), one.run_dir, one.config)

        limits = turn_processes.limits_of(group[0].config)
        settings = [_setting(one) for one in group]
        try:
            return turn_processes.run_in_turns(jobs, settings, self._server, tell, line, limits)
        finally:
            line.clear()

    def _relay(self, printed: tuple[str, str], title: str, warned: set[str]) -> None:
        """Print what a run has printed, if the user wants details; warnings in any case, each once."""
        output, errors = printed
        if is_verbose():
            print(f"\n— {title}\n{output}", end="", flush=True)
        for line in errors.splitlines():
            if line not in warned:
                warned.add(line)
                print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Report a user's error, and continue with the other runs."""
        try:
            yield
        except UserError as error:
            report(error)
            self.refused |= not isinstance(error, RunFailed)

    def run(self, title: str, run_dir: Path, config: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        """The record of a run that has finished; RunFailed if it ended in another way."""
        record = folder.keep_or_plan(run_dir, config, command=shlex.join(self.command), **facts)
        kept = record is not None
        print(f"\n— {title}{' — kept' if kept else ''}", flush=True)
        if record is None:
            started = time.monotonic()
            server = self._server if is_one_process(config) else None  # Lightning's other ranks are new Pythons
            record = run_in_subprocess(run_dir, trust.digest(config), server)
            self.durations.append(time.monotonic() - started)
        self._check(record, run_dir, config, kept)
        if not is_verbose():
            print(f"  {_outcome(record)}", flush=True)
        return record

    def _check(self, record: dict[str, Any], run_dir: Path, config: dict[str, Any], kept: bool = False) -> None:
        """Say why a run has not finished, and raise RunFailed."""
        if record["status"] == "finished":
            return
        reason = str(record.get("error") or record["status"])
        lines = [printable(f"  {record['status'].replace('_', ' ')}: {reason}")]
        if kept and record["status"] == "failed":
            place = os.path.relpath(run_dir)
            lines.append(f"  to resume it: {resume_command(config, Path(place))}")
            lines.append(f"  to run it again with the sweep: {shlex.join(['mv', place, f'{place}.aside'])}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        raise RunFailed(f"{run_dir}: {reason}", status=record["status"])

    def search(self, number: int, run_dir: Path, config: dict[str, Any], facts: dict[str, Any]) -> float | None:
        """Search for a batch size, with a run for each size in a folder below the job's own.

        A run that fails for another reason than memory ends the search, and so does one without a rate.
        """
        search = BatchSizeSearch(**{key: value for key, value in config["search"].items() if key != "_target_"})
        of_job = f"search {number + 1} of {self.expected}, " if self.expected > 1 else ""
        records: list[dict[str, Any]] = []
        tried: list[int] = []

        def sized(batch_size: int, *folder: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
            """Where a run with this size lies, its configuration and its facts."""
            place = os.path.join(config["run_dir"], *folder, str(batch_size))
            changed = {**config, "data": {**config["data"], "batch_size": batch_size}}
            known = {**facts, "overrides": [*facts["overrides"], f"data.batch_size={batch_size}"]}
            folder_of_run = run_dir.joinpath(*folder, str(batch_size))
            return folder_of_run, with_run_dir(changed, config["run_dir"], place), known

        def measure(batch_size: int) -> float | None:
            tried.append(batch_size)
            title = f"{of_job}run {len(tried)} of at most {search.max_runs}: data.batch_size={batch_size}"
            place = sized(batch_size)
            try:
                record = self.run(title, *place)
            except RunFailed as failed:
                if failed.status == "out_of_memory":
                    return None
                why = f"  the search ends: {failed.status} does not say whether the batch fits"
                print(why, file=sys.stderr, flush=True)
                raise
            records.append(record)
            rate = record["throughput"].get(RATE)
            if rate is None:
                where = place[1]["run_dir"]
                raise UserError(f"search: needs the rate of a run, and {where} has none; leave callbacks.throughput on")
            return rate

        def limit() -> int | None:
            samples = records[-1]["dataset"]["train_samples"] if records else None  # None: a stream that is not counted
            return max(1, samples // records[-1].get("processes", 1)) if samples else None  # for one rank

        found = search.find(measure, limit, lambda: recommended_in(run_dir))
        again = [Waiting(number, *sized(size, "again")) for size in undecided_in(run_dir)]
        if (
            len(again) < 2
            or not self._takes_turns(again[0].config, {})
            or any(map(_has_ended, run_dir.glob("again/*")))
        ):
            return found
        self._run_group(again)  # side by side, which tells smaller differences
        return recommended_in(run_dir) or found

    def report(self) -> None:
        """Write and print the table and the recommendation; they can be made again from the sweep's folder."""
        from ..analysis import write_report  # matplotlib takes a second to import

        try:
            text = write_report([self.sweep_dir], self.sweep_dir / "report").printed
        except UserError as error:
            try:  # where its files cannot be written, they are written elsewhere, and the text is printed
                with tempfile.TemporaryDirectory() as elsewhere:
                    text = write_report([self.sweep_dir], elsewhere).text
            except (UserError, OSError):  # no run left a record: what went wrong has been said
                return
            print(f"warning: {error}", file=sys.stderr, flush=True)
        print(f"\n{text}", flush=True)

    def print_remaining(self) -> None:
        """After an interruption: which runs are left, and the command that resumes the sweep."""
        left = [label for number, label in enumerate(self.labels) if not _has_ended(self.sweep_dir / str(number))]
        if left:
            print(f"\nnot run  {len(left)} of {self.expected}: " + " · ".join(left))
        line = [word for word in self.command if not word.lstrip("+").startswith("hydra.sweep.dir=")]
        line.append(as_override("hydra.sweep.dir", str(self.sweep_dir)))
        print(f"resume   {shlex.join(line)}", flush=True)

    @property
    def exit_code(self) -> int:
        """1 if a run failed for another reason than memory, or was refused."""
        return int(self.refused or any(status not in folder.KEPT for status in folder.statuses(self.sweep_dir)))


def is_one_process(config: Mapping[str, Any]) -> bool:
    """Whether a run is a single process: Lightning starts the other ranks as new Pythons."""
    trainer = config["trainer"]
    return trainer.get("num_nodes", 1) == 1 and str(trainer.get("devices", "auto")) == "1"


def _outcome(record: Mapping[str, Any]) -> str:
    """`3,230 samples/s · test acc 98.9 % · 47 s`, as far as it is known."""
    rate, metrics = positive(at(record, f"throughput.{MEAN_RATE}")), record.get("metrics", {})
    words = [f"{significant(rate)} samples/s"] if rate else []
    shown = best_first(key for key in metrics if key.startswith("test/"))[:1]
    words += [f"{key.replace('/', ' ')} {metric(key).text(metrics[key])}" for key in shown]
    return " · ".join([*words, duration(record.get("seconds", 0))])


def _setting(run: Waiting) -> tuple[str, int]:
    """What a run is compared with: runs that differ in batch size, seed and what is scaled along; and its batch size."""
    words = [word for word in run.facts["overrides"] if not word.lstrip("+").startswith(_NOT_COMPARED)]
    return " ".join(sorted(words)), int(run.config["data"]["batch_size"])


def _ran_out_of_memory(run_dir: Path) -> bool:
    return folder.statuses(run_dir) == ["out_of_memory"]


def _has_ended(run_dir: Path) -> bool:
    found = folder.statuses(run_dir)
    return bool(found) and all(status in (*folder.KEPT, "failed") for status in found)
