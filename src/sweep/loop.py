"""The one loop that does runs: a plan (plans.py) says which, and gets their records back."""

import contextlib
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..errors import UserError, printable
from ..files import WriteError, why
from ..options.command_lines import program, resume_command
from ..records.formatting import duration, significant
from ..records.metrics import best_first, metric, staged
from ..records.rates import MEAN_RATE
from ..records.read import read
from ..records.terminal import LiveLine, is_verbose
from ..records.values import at, positive, table
from . import folder
from .fork_server import ForkServer
from .plans import Job, Plan, Record
from .process import Process, running
from .visits import can_wait, measure_together

T = TypeVar("T")


class Loop:
    """Does runs.

    Args:
        server: forks the runs; without one each is a new Python.
        command: whose runs they are.

    Attributes:
        command: the words that the user has typed; the records hold them.
        refused: whether a run was refused without a record that says so.
    """

    def __init__(self, server: ForkServer | None = None, command: str = "train"):
        self.refused = False
        self.command = [*program(command), *sys.argv[1:]]
        self._server = server
        self._durations: list[float] = []  # seconds, of the runs that were done alone

    def run(self, plan: Plan[T]) -> T:
        """Do all runs of a plan; what the plan returns.

        Raises:
            SystemExit: once the runs have ended, if a signal has asked this process to stop.
        """
        try:
            jobs = next(plan)
            while True:
                jobs = plan.send(self.do(jobs))
        except StopIteration as end:
            return end.value

    def do(self, jobs: Sequence[Job]) -> list[Record]:
        """Do runs, and return their records in the same order."""
        records: dict[Job, Record] = {}
        waiting: list[Job] = []
        for number, job in enumerate(jobs):
            if len(jobs) > 1 and can_wait(job.config) and not folder.has_ended(job.run_dir):
                waiting.append(job)
            else:
                records[job] = self._do_alone(job, len(jobs) - number)
        while len(waiting) > 1:
            waiting = self._do_together(waiting, records)
        for number, job in enumerate(jobs):
            if job not in records:  # the last that waits, or one that ran out of memory beside others
                records[job] = self._do_alone(job, len(jobs) - number)
        return [records[job] for job in jobs]

    def _prepare(self, job: Job) -> Record | None:
        """None if the job's folder is ready for the run; otherwise why there is no run."""
        try:
            return folder.keep_or_plan(job.run_dir, job.config, command=shlex.join(self.command), **job.facts)
        except UserError as error:
            self.refused = True
            return {"status": "refused", "error": str(error)}

    def _do_alone(self, job: Job, left: int) -> Record:
        """Do a run while no other run trains; `left` are the runs that are left with it."""
        record = self._prepare(job)
        kept = record is not None
        if job.title and (record is None or record["status"] != "refused"):
            about = statistics.mean(self._durations) * left if self._durations and left > 1 and not kept else 0.0
            note = " — kept" if kept else f" — about {duration(about)} left" if about else ""
            print(f"\n— {job.title}{note}", flush=True)
        if record is None:
            started = time.monotonic()
            with _output(job) as output, running(self._server) as processes:
                processes.start(job, output)
            self._durations.append(time.monotonic() - started)
            record = self._read(job)
        self._say_end(job, record, kept)
        return record

    def _do_together(self, jobs: Sequence[Job], records: dict[Job, Record]) -> list[Job]:
        """Visit runs side by side, and note their records; the jobs that are left."""
        line, warned = LiveLine(), set[str]()
        ready = []
        for job in jobs:
            if (record := self._prepare(job)) is None:
                ready.append(job)
            else:
                records[job] = record
                self._say_end(job, record, kept=True)
        with contextlib.ExitStack() as files, running(self._server) as processes:
            files.callback(line.clear)
            printed: dict[Job, list[BinaryIO]] = {}

            def start(job: Job) -> Process:
                if job.log is not None:
                    return processes.start(job, files.enter_context(_output(job)), visited=True)
                printed[job] = [files.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
                out, err = printed[job]
                return processes.start(job, (out.fileno(), err.fileno()), visited=True)

            def end(process: Process) -> None:
                line.clear()
                job, record = process.job, self._read(process.job)
                if job in printed:
                    output, errors = map(_text_of, printed[job])
                    _warn_once(errors, warned)
                    if is_verbose():
                        print(f"\n— {job.title}\n{output}", end="", flush=True)
                if record["status"] == "out_of_memory" and len(ready) > 1:
                    # At once: a sweep that ends meanwhile would be repeated with this run kept.
                    aside, place = folder.set_run_aside(job.run_dir), os.path.relpath(job.run_dir)
                    print(
                        f"{place} ran out of memory beside other runs, and is done alone; what it left is in {aside}",
                        flush=True,
                    )
                else:
                    records[job] = record
                    if record["status"] != "finished":
                        self._say_end(job, record)

            left = measure_together(ready, start, end, line if any(job.title for job in jobs) else lambda text: None)
        return left

    def _read(self, job: Job) -> Record:
        """The record of a run that has ended; if somebody has removed or damaged it, the other runs go on."""
        try:
            return read(job.run_dir)
        except UserError as error:
            self.refused = True
            return {"status": "refused", "error": str(error)}

    def _say_end(self, job: Job, record: Record, kept: bool = False) -> None:
        """Say how a run has ended that has a title; of another one, its plan says all."""
        if not job.title:
            return
        if record["status"] == "finished":
            if not is_verbose():
                print(f"  {_outcome(record)}", flush=True)
            return
        reason = str(record.get("error") or record["status"])
        is_refused = record["status"] == "refused"
        lines = [f"error: {reason}" if is_refused else printable(f"  {record['status'].replace('_', ' ')}: {reason}")]
        if kept and record["status"] == "failed":
            place = os.path.relpath(job.run_dir)
            lines.append(f"  to resume it: {resume_command(job.config, Path(place))}")
            lines.append(f"  to run it again with the sweep: {shlex.join(['mv', place, f'{place}.aside'])}")
        print("\n".join(lines), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _output(job: Job) -> Iterator[tuple[int, int]]:
    """The descriptors of a run's standard output and standard error. Raises WriteError."""
    if job.log is None:
        yield 1, 2
        return
    try:
        log = job.log.open("ab")
    except OSError as error:
        raise WriteError(f"{job.log} cannot be written: {why(error)}") from error
    with log:
        yield log.fileno(), log.fileno()


def _text_of(file: BinaryIO) -> str:
    """What a run has printed; of a line that was drawn again and again, its last state."""
    file.seek(0)
    lines = file.read().decode(errors="replace").replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _warn_once(errors: str, warned: set[str]) -> None:
    """Print what runs have written to standard error: warnings, each once."""
    for line in errors.splitlines():
        if line not in warned:
            warned.add(line)
            print(line, file=sys.stderr, flush=True)


def _outcome(record: Mapping[str, Any]) -> str:
    """`3,230 samples/s · test acc 98.9 % · 47 s`, as far as it is known."""
    rate = positive(at(record, f"throughput.{MEAN_RATE}"))
    metrics = {staged(key): value for key, value in record.get("metrics", {}).items()}
    words = [f"{significant(rate)} samples/s"] if rate else []
    shown = best_first(key for key in metrics if key.startswith("test/"))[:1]
    words += [f"{key.replace('/', ' ')} {metric(key).text(metrics[key])}" for key in shown]
    if target := table(record.get("target")):
        seconds = positive(record.get("time_to_target_s"))
        ended = f"not reached: {target['ended']}" if target.get("ended") else "not reached"
        words.append(f"target after {duration(seconds)} of training" if seconds else f"target {ended}")
    return " · ".join([*words, duration(record.get("seconds", 0))])
