"""The one loop that does runs: a plan (plans.py) says which, and gets their records back."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._system import command_line, relative
from ..errors import UserError, printable, warn
from ..records.formatting import duration
from ..records.metrics import best_first, metric, staged
from ..records.read import FILE, read
from ..records.terminal import is_verbose
from ..records.values import positive, table
from . import folder
from .plans import LOG, Job, Plan, Record
from .process import Process, Processes
from .visits import Together, can_wait, groups_of, to_visit

TIMING_MISSED = "timing=true: not all runs can be timed side by side; docs/batch-size.md says which"


class Loop:
    """Does the runs of a command."""

    def __init__(self, command: str = "train"):
        self.refused = False  # whether a run was refused, or its record could not be read
        self.command = ["batchscope", command, *sys.argv[1:]]  # what the user has typed; the records hold it

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
        """Do runs, and return their records in the same order. All are planned before the first one begins."""
        records = {job: record for job in jobs if (record := self.prepare(job)) is not None}
        left = [job for job in jobs if job not in records]
        suited = [job for job in jobs if len(jobs) > 1 and can_wait(job.config)]
        groups = [group for group in groups_of(suited) if len(group) > 1]  # of kept runs, too, as in a report
        shared = {job for group in groups for job in group}
        if len(jobs) > 1 and any(job.config.get("timing") is True for job in jobs if job not in shared):
            warn(TIMING_MISSED)
        visited = to_visit([job for job in suited if job in left])
        for group in groups if len(visited) > 1 else []:
            waiting = [job for job in group if job in visited]
            while len(waiting) > 1:
                with Processes() as processes:
                    waiting = Together(self, processes, records).measure(waiting)
        for job in left:
            if job not in records:  # it cannot wait, is compared with no other, or has the speed of a visited run
                records[job] = self._do_alone(job)
        return [records[job] for job in jobs]

    def prepare(self, job: Job) -> Record | None:
        """None if the job's folder is ready for the run; otherwise the record that takes its place, whose end is said."""
        try:
            record = folder.keep_or_plan(job.run_dir, job.config, command=command_line(self.command), **job.facts)
        except UserError as error:
            record = self._refused(error)
        if record is not None:
            if record["status"] != "refused":
                print(f"\n— {job.title} — kept", flush=True)
            log = job.run_dir / LOG
            self.say_end(record, log if log.exists() else None)
            if record["status"] not in ("refused", *folder.KEPT):
                place = relative(job.run_dir)
                print(f"  not done again; to repeat it, rename {place} to {place}.aside", file=sys.stderr, flush=True)
        return record

    def _do_alone(self, job: Job) -> Record:
        """Do a run while no other run trains."""
        if (kept := self.prepare(job)) is not None:
            return kept
        print(f"\n— {job.title}", flush=True)
        with Processes() as processes:
            processes.add(lambda: Process(job, (2 if sys.stdout is sys.stderr else 1, 2)))
        record = self.read(job)
        self.say_end(record)
        return record

    def read(self, job: Job) -> Record:
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

    def say_end(self, record: Record, log: Path | None = None) -> None:
        """Say how a run has ended, which has printed into a `log` or to the terminal."""
        status, reason = record["status"], str(record.get("error") or record["status"])
        if status == "finished":
            if not is_verbose():
                print(f"  {_outcome(record)}", flush=True)
        elif status == "refused":
            print(f"error: {reason}", file=sys.stderr, flush=True)
        else:
            print(printable(f"  {status.replace('_', ' ')}: {reason}"), file=sys.stderr, flush=True)
            if log is not None:
                print(f"  its output: {relative(log)}", file=sys.stderr, flush=True)


def _outcome(record: Mapping[str, Any]) -> str:
    """`test acc 98.9 % · 47 s`, as far as it is known; the report has the rate."""
    metrics = {staged(key): value for key, value in record.get("metrics", {}).items()}
    shown = best_first(key for key in metrics if key.startswith("test/"))[:1]
    words = [f"{key.replace('/', ' ')} {metric(key).text(metrics[key])}" for key in shown]
    if target := table(record.get("target")):
        seconds = positive(record.get("time_to_target_s"))
        ended = f"not reached: {target['ended']}" if target.get("ended") else "not reached"
        reached = f"after {duration(seconds)} of training" if seconds else "reached"
        words.append(f"target {reached if target.get('reached') else ended}")
    return " · ".join([*words, duration(record.get("seconds", 0))])
