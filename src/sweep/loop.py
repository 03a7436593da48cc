"""The one loop that does runs: a plan (plans.py) yields jobs, and receives their records."""

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
from .visits import VisitGroup, can_wait, group_jobs, visited_jobs

TIMING_MISSED = "timing=true: not all runs can be timed side by side; docs/batch-size.md says which"


class Loop:
    """The loop that does the runs of a command."""

    def __init__(self, command: str = "train"):
        self.has_refused = False  # whether a run was refused, or its record could not be read
        self.command = ["batchscope", command, *sys.argv[1:]]  # what the user has typed, for the records

    def run(self, plan: Plan) -> None:
        """Do all runs of a plan. Raise SystemExit after a signal, once the runs have ended."""
        records: Any = None  # a generator that has not begun accepts only None
        while True:
            try:
                jobs = plan.send(records)
            except StopIteration:
                return
            records = self.do(jobs)

    def do(self, jobs: Sequence[Job]) -> list[Record]:
        """Do runs, and return their records in the same order. All runs are planned before the first one begins."""
        records = {job: record for job in jobs if (record := self.prepare(job)) is not None}
        planned = [job for job in jobs if job not in records]
        can_be_visited = [job for job in jobs if len(jobs) > 1 and can_wait(job.config)]
        groups = [group for group in group_jobs(can_be_visited) if len(group) > 1]  # with kept runs, as in a report
        grouped = {job for group in groups for job in group}
        if len(jobs) > 1 and any(job.config.get("timing") is True for job in jobs if job not in grouped):
            warn(TIMING_MISSED)
        to_visit = visited_jobs([job for job in can_be_visited if job in planned])
        for group in groups if len(to_visit) > 1 else []:
            waiting = [job for job in group if job in to_visit]
            while len(waiting) > 1:
                with Processes() as processes:
                    waiting = VisitGroup(self, processes, records).measure(waiting)
        for job in planned:
            if job not in records:  # it cannot wait, shares no group, or has the speed of a visited run
                records[job] = self._do_alone(job)
        return [records[job] for job in jobs]

    def prepare(self, job: Job) -> Record | None:
        """Prepare the job's folder and return None; if the run is kept or refused, print that and return its record."""
        try:
            command = command_line(self.command)
            record = folder.keep_or_plan(job.run_dir, job.config, command=command, **job.record_fields)
        except UserError as error:
            record = self._refuse(error)
        if record is not None:
            if record["status"] != "refused":
                print(f"\n— {job.title} — kept", flush=True)
            log = job.run_dir / LOG
            self.print_end(record, log if log.exists() else None)
            if record["status"] not in ("refused", *folder.KEPT_STATUSES):
                path = relative(job.run_dir)
                print(f"  not done again; to repeat it, rename {path} to {path}.aside", file=sys.stderr, flush=True)
        return record

    def _do_alone(self, job: Job) -> Record:
        """Do a run while no other run trains."""
        if (record := self.prepare(job)) is not None:
            return record
        print(f"\n— {job.title}", flush=True)
        with Processes() as processes:
            processes.add(lambda: Process(job, (2 if sys.stdout is sys.stderr else 1, 2)))
        record = self.read(job)
        self.print_end(record)
        return record

    def read(self, job: Job) -> Record:
        """Return the record of a run that has ended; a missing or damaged one is `refused`, and other runs go on."""
        try:
            record = read(job.run_dir)
            if not isinstance(record.get("status"), str):
                raise UserError(f"{job.run_dir / FILE}: does not say how the run ended")
            return record
        except UserError as error:
            return self._refuse(error)

    def _refuse(self, error: UserError) -> Record:
        self.has_refused = True
        return {"status": "refused", "error": str(error)}

    def print_end(self, record: Record, log: Path | None = None) -> None:
        """Print how a run has ended. `log` has the output of the run, unless that went to the terminal."""
        status = record["status"]
        reason = str(record.get("error") or ("its end could not be recorded" if status == "running" else status))
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
    """Return `test acc 98.9 % · 47 s`, without what the record does not have; the report has the rate."""
    metrics = {staged(key): value for key, value in record.get("metrics", {}).items()}
    best_keys = best_first(key for key in metrics if key.startswith("test/"))[:1]
    parts = [f"{key.replace('/', ' ')} {metric(key).text(metrics[key])}" for key in best_keys]
    if target := table(record.get("target")):
        seconds = positive(record.get("time_to_target_s"))
        not_reached = f"not reached: {target['ended']}" if target.get("ended") else "not reached"
        reached = f"after {duration(seconds)} of training" if seconds else "reached"
        parts.append(f"target {reached if target.get('reached') else not_reached}")
    return " · ".join([*parts, duration(record.get("seconds", 0))])
