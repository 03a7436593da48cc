"""The one loop that does runs: a plan (plans.py) says which, and gets their records back."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._system import command_line, relative
from ..errors import UserError, printable, warn
from ..files import WriteError, why
from ..hardware.programs import ProgramWatch
from ..options.command_lines import program
from ..records.formatting import duration
from ..records.metrics import best_first, metric, staged
from ..records.rates import LOAD_SAID
from ..records.read import FILE, read
from ..records.terminal import LiveLine, is_verbose
from ..records.values import positive, table
from . import folder
from .plans import LOG, Job, Plan, Record
from .process import Process, Processes
from .visits import Together, can_wait, groups_of, is_timed, to_visit


class Loop:
    """Does the runs of a command."""

    def __init__(self, command: str = "train"):
        self.refused = False  # whether a run was refused, or its record could not be read
        self.command = [*program(command), *sys.argv[1:]]  # what the user has typed; the records hold it

    def run(self, plan: Plan) -> None:
        """Do all runs of a plan. SystemExit follows a signal, once the runs have ended."""
        records: Any = None  # nothing is sent to a plan that has not begun
        while True:
            try:
                jobs = plan.send(records)
            except StopIteration:
                return
            records = self.do(jobs)

    def do(self, jobs: Sequence[Job]) -> list[Record]:
        """Do runs, and return their records in the same order."""
        records: dict[Job, Record] = {}
        suited = [job for job in jobs if len(jobs) > 1 and can_wait(job.config)]
        groups = groups_of(suited)
        alone = [job for job in jobs if all(job not in group or len(group) < 2 for group in groups)]
        if len(jobs) > 1 and any(job.config.get("timing") is True for job in alone):
            warn("timing=true: not all runs can be timed side by side; docs/batch-size.md says which")
        kept = [job for job in jobs if folder.has_ended(job.run_dir)]
        visited = to_visit([job for job in suited if job not in kept])
        for job in kept:
            records[job] = self._do_alone(job)
        for group in groups if len(visited) > 1 else []:  # also of runs that are kept, as in the report
            waiting = [job for job in group if job in visited]
            while len(waiting) > 1:
                waiting = self._do_together(waiting, records)
        for job in jobs:
            if job not in records:  # it cannot wait, is compared with no other, or has the speed of a visited run
                records[job] = self._do_alone(job)
        return [records[job] for job in jobs]

    def _do_alone(self, job: Job) -> Record:
        """Do a run while no other run trains."""
        record = self._kept(job)
        kept = record is not None
        if record is None or record["status"] != "refused":
            print(f"\n— {job.title}{' — kept' if kept else ''}", flush=True)
        if record is None:
            with Processes() as processes:
                processes.add(lambda: Process(job, (2 if sys.stdout is sys.stderr else 1, 2)))
            record = self._read(job)
        self._say_end(job, record)
        return record

    def _do_together(self, jobs: Sequence[Job], records: dict[Job, Record]) -> list[Job]:
        """Visit runs side by side, and note their records; the jobs that are left."""
        ready: list[Job] = []
        for job in jobs:
            if (record := self._kept(job)) is None:
                ready.append(job)
            else:
                records[job] = record
                self._say_end(job, record)
        if not ready:
            return []
        line, warned, started = LiveLine(), set[str](), list[Job]()
        programs = ProgramWatch([os.getpid()])
        with contextlib.ExitStack() as at_end, Processes() as processes:
            at_end.callback(line.clear)

            def start(job: Job) -> Process:
                started.append(job)
                with _log_of(job) as log:  # the run has it open, and this process has not: the folder may be renamed
                    return processes.add(lambda: Process(job, (log, log), visited=True))

            def end(process: Process, beside_others: bool) -> None:
                process.wait()
                line.clear()
                job, record = process.job, self._read(process.job)
                if beside_others and record["status"] == "out_of_memory":  # it may fit alone, and is done so in the end
                    folder.free_for_another_try(job.run_dir)
                    print(f"{job.title} found no memory beside others, and is done again alone", flush=True)
                    return
                records[job] = record
                if processes.stopped_by is not None and record["status"] == "interrupted":
                    return
                if not is_timed(job.config) or is_verbose():
                    print(f"\n— {job.title}", flush=True)
                _show_log(job)
                _show_warnings(job, warned, line)
                if record["status"] != "finished" or not is_timed(job.config):
                    self._say_end(job, record)

            def say(text: str, stays: bool = False, now: bool = False) -> None:
                programs.sample()
                for job in started if stays or now else ():  # not between passes: a log may be long
                    _show_warnings(job, warned, line)
                if stays:
                    line.clear()
                    print(text, flush=True)
                else:
                    line(text, now)

            left = Together(start, end, say).measure(ready)
            if sum(share for _, share in programs.top()) >= LOAD_SAID:
                say(f"beside these runs: {programs.words()} of the processor", stays=True)  # in no file
            return left

    def _kept(self, job: Job) -> Record | None:
        """None if the job's folder is ready for the run; otherwise the record that takes its place."""
        try:
            return folder.keep_or_plan(job.run_dir, job.config, command=command_line(self.command), **job.facts)
        except UserError as error:
            return self._refused(error)

    def _read(self, job: Job) -> Record:
        """The record of a run that has ended; if somebody has removed or damaged it, the other runs go on."""
        try:
            record = read(job.run_dir)
            if not isinstance(record.get("status"), str):
                raise UserError(f"{job.run_dir / FILE}: does not say how the run ended")
            return record
        except UserError as error:
            return self._refused(error)

    def _refused(self, error: UserError) -> Record:
        self.refused = True
        return {"status": "refused", "error": str(error)}

    def _say_end(self, job: Job, record: Record) -> None:
        """Say how a run has ended."""
        if record["status"] == "finished":
            if not is_verbose():
                print(f"  {_outcome(record)}", flush=True)
            return
        reason = str(record.get("error") or record["status"])
        is_refused = record["status"] == "refused"
        lines = [f"error: {reason}" if is_refused else printable(f"  {record['status'].replace('_', ' ')}: {reason}")]
        if (job.run_dir / LOG).exists() and not is_refused:
            lines.append(f"  its output: {relative(job.run_dir / LOG)}")
        print("\n".join(lines), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _log_of(job: Job) -> Iterator[int]:
    """The descriptor of the file that a visited run prints into. Raises WriteError."""
    path = job.run_dir / LOG
    try:
        log = path.open("ab")
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {why(error)}") from error
    with log:
        yield log.fileno()


def _show_log(job: Job) -> None:
    """Print what a run has written, if details are wanted."""
    if is_verbose():
        with contextlib.suppress(OSError):
            print((job.run_dir / LOG).read_text(errors="replace"), end="", flush=True)


def _show_warnings(job: Job, warned: set[str], line: LiveLine) -> None:
    """Print the warnings of a run that no run has had before, unless all that it writes is shown."""
    if is_verbose():
        return
    with contextlib.suppress(OSError):
        for text in (job.run_dir / LOG).read_text(errors="replace").splitlines():
            if text.startswith("warning: ") and text not in warned:
                warned.add(text)
                line.clear()
                print(text, file=sys.stderr, flush=True)


def _outcome(record: Mapping[str, Any]) -> str:
    """`test acc 98.9 % · 47 s`, as far as it is known; the report has the rate."""
    metrics = {staged(key): value for key, value in record.get("metrics", {}).items()}
    shown = best_first(key for key in metrics if key.startswith("test/"))[:1]
    words = [f"{key.replace('/', ' ')} {metric(key).text(metrics[key])}" for key in shown]
    if target := table(record.get("target")):
        seconds = positive(record.get("time_to_target_s"))
        ended = f"not reached: {target['ended']}" if target.get("ended") else "not reached"
        words.append(f"target after {duration(seconds)} of training" if seconds else f"target {ended}")
    return " · ".join([*words, duration(record.get("seconds", 0))])
