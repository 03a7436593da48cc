"""Runs side by side on a device: their processes are set up together, and are visited in passes (passes.py).

A timed run ends with the passes. A training then waits for its turn, and goes on to its end while no other run trains.

Runs that differ only in batch size and seed share passes; such groups follow each other. The first run, which may need
to calibrate the device, is set up alone, and the others several at a time. They warm up one after the other. A waiting
run keeps its memory on the host and on the device. So the next run warms up only if there is enough memory for it;
otherwise it stays set up until the runs before it have ended.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil
from typing_extensions import override

from .._system import may_have_accelerator, relative
from ..analysis.groups import group_runs
from ..analysis.run import Run
from ..analysis.selection import ENOUGH_SHARE
from ..files import as_write_error
from ..hardware.host_memory import host_memory
from ..hardware.programs import ProgramWatch
from ..options.ranks import ranks_asked
from ..records.formatting import count, duration
from ..records.rates import REPORTED_LOAD
from ..records.terminal import LiveLine, is_verbose
from ..records.values import at
from . import folder
from .passes import MIN_PASSES, Limits, WaitingRun, measure_in_passes
from .plans import LOG, Job, Record
from .process import Process, Processes

if TYPE_CHECKING:
    from .loop import Loop

MAX_AT_ONCE = 16  # runs; a larger sweep is measured in parts
_SET_UP_AT_ONCE = min(4, os.cpu_count() or 1)  # runs; each keeps a core busy while it reads and checks its options
_FREE_SHARE = 0.25  # the share of the memory that stays free
_CONTEXT_BYTES = 2**30  # of a device, which a process takes beside its tensors: CUDA's context, workspaces of libraries
_PASSES_PER_S = 1_000_000  # more than are possible: passes that are measured later in the same folder get other numbers
_MIN_VISITS = 2 * MIN_PASSES  # that fit into any training; the first update of each visit is not measured
_LONG_FIT_S = 3600.0  # no run waits for a longer training, and holds memory meanwhile, unless the user asks for it


def can_wait(config: Mapping[str, Any]) -> bool:
    """Whether a run can wait for visits: its one process measures steps, has no target, and can share the device."""
    callbacks, trainer = config["callbacks"] or {}, config["trainer"]
    is_measured = callbacks.get("throughput") and not trainer.get("fast_dev_run") and config.get("timing") is not False
    is_suitable = is_measured and ranks_asked(config) == 1 and config.get("target") is None
    return bool(is_suitable) and _can_share_device(trainer.get("accelerator", "auto"))


def _can_share_device(accelerator: str) -> bool:
    """Whether several processes can hold memory of the device that `trainer.accelerator` selects.

    A CPU allows it, and so does a CUDA device whose driver does not restrict it to one process.
    """
    if accelerator == "cpu" or (accelerator == "auto" and not may_have_accelerator()):
        return True
    from ..hardware.devices import selected_device
    from ..hardware.nvml_readings import takes_one_process

    kind, _ = selected_device(accelerator)
    return (kind == "cpu" and accelerator == "auto") or (kind == "cuda" and not takes_one_process())


def is_timed(config: Mapping[str, Any]) -> bool:
    """Whether a run ends once its rate is known; otherwise it trains as long as its configuration says."""
    return bool((config["callbacks"] or {}).get("until_known"))


def visited_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that are visited: all timed runs, and the first of the trainings with the same speed."""
    jobs_by_speed: dict[str, Job] = {}
    for number, job in enumerate(jobs):
        speed = str(number) if is_timed(job.config) else _planned_run(job, number).speed_setting
        jobs_by_speed.setdefault(speed, job)
    return list(jobs_by_speed.values())


def group_jobs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs that share passes: of several batch sizes, else equal but for the seed; all, if any has `seconds`."""
    if any(job.seconds is not None for job in jobs):
        return [[*jobs]]
    groups = group_runs([_planned_run(job, number) for number, job in enumerate(jobs)]).groups
    return [[jobs[run.number] for run in group.runs] for group in groups if len({run.asked for run in group.runs}) > 1]


def _planned_run(job: Job, number: int) -> Run:
    """Return a run that has not begun, in the form that a report reads."""
    hardware = {"device": at(job.config, "trainer.accelerator")}
    record = {"config": job.config, "choices": job.record_fields["choices"], "hardware": hardware}
    return Run(job.run_dir.name, job.run_dir, record, number)


class VisitedRun(WaitingRun):
    """A run in its process, which prints into the run's log. WriteError if the log cannot be written.

    `on_end` is called when the run ends; it waits for the end of the process.
    """

    def __init__(self, job: Job, processes: Processes, on_end: Callable[["VisitedRun"], None]):
        super().__init__(int(job.config["data"].get("batch_size") or 1), not is_timed(job.config))
        self.job, self._on_end = job, on_end
        self.device_memory: Mapping[str, int] = {}  # bytes, as the run has read them last
        self.answered_at = 0.0  # the monotonic time of the run's last answer
        self.is_warm = False
        self.fit_s: float | None = None  # estimated seconds of training after the warm-up; None if unknown
        with as_write_error("hydra.sweep.dir", job.run_dir / LOG):
            log = (job.run_dir / LOG).open("ab")
        self._log_start = log.tell()  # the bytes before it come from an earlier start of the run
        with log:  # the run keeps the log open, and this process does not: the folder may be renamed
            self.process = processes.add(lambda: Process(job, (log.fileno(), log.fileno()), visited=True))

    def output(self) -> str:
        """Return what the run has printed so far."""
        with contextlib.suppress(OSError), (self.job.run_dir / LOG).open(errors="replace") as log:
            log.seek(self._log_start)
            return log.read()
        return ""

    def handle_answer(self, answer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Keep the device's memory from an answer of the run, and return the answer; None means that the run ends."""
        if answer is None:
            self._on_end(self)
        else:
            self.device_memory, self.answered_at = answer.get("device") or self.device_memory, time.monotonic()
        return answer

    def warm_up(self) -> bool:
        """Train the updates that are not measured, once; return whether the run goes on."""
        if not self.is_warm and (answer := self.handle_answer(self.process.ask("warm up"))):
            self.is_warm, self.fit_s = True, answer.get("fit_s")
        return self.is_warm

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """Visit a training of a few seconds for a shorter time, so that it is in as many passes as a verdict needs."""
        seconds = min(seconds, (self.fit_s or math.inf) / _MIN_VISITS)
        return self.handle_answer(self.process.ask(f"go {number} {seconds}"))

    @override
    def stop(self, reason: str) -> None:
        if not self.goes_on:  # a training waits for its turn to go on
            self.end(f"stop {reason}")

    def end(self, order: str) -> None:
        """Send the order with which the run goes on to its end, and wait for the end."""
        self.process.send_line(order)
        self._on_end(self)


class VisitGroup:
    """Runs that are compared, and are visited side by side.

    A run that has ended is added to `records`, and the loop prints how it has ended.
    """

    def __init__(self, loop: "Loop", processes: Processes, records: dict[Job, Record]):
        self._loop, self._processes, self._records = loop, processes, records
        self._line, self._shown_warnings = LiveLine(), set[str]()
        self._programs, self._sampled_at = ProgramWatch([os.getpid()]), -math.inf
        self._started: list[VisitedRun] = []

    def measure(self, jobs: Sequence[Job]) -> list[Job]:
        """Visit as many runs with equal limits as there is memory for, and let the trainings go on to their ends.

        Return the jobs that were not started.
        """
        selected = [job for job in jobs if _visit_limits(job) == _visit_limits(jobs[0])][:MAX_AT_ONCE]
        self._show(f"preparing {count(len(selected), 'setting')}")
        try:
            self._set_up(selected)
            waiting = _active_runs(self._started)
            while waiting:
                warm: list[VisitedRun] = []
                while waiting and (not _active_runs(warm) or self._has_memory_for(1, warm)):
                    warm.append(waiting.pop(0))
                    warm[-1].warm_up()
                long_runs = [run for run in _active_runs(warm) if self._is_long(run)]
                runs = [run for run in _active_runs(warm) if run not in long_runs]
                if len(runs) > 1 or any(not run.goes_on for run in runs):
                    first_pass = int(_PASSES_PER_S * time.time())
                    measure_in_passes(runs, _visit_limits(runs[0].job), say=self._show, first_pass=first_pass)
                self._train_to_end([*_active_runs(runs), *long_runs])
            self._programs.sample()
            if sum(share for _, share in self._programs.top()) >= REPORTED_LOAD:
                self._print(f"beside these runs: {self._programs.words()} of the processor")  # in no file
        finally:
            self._line.clear()
        started_jobs = {run.job for run in self._started}
        return [job for job in jobs if job not in started_jobs]

    def _set_up(self, jobs: Sequence[Job]) -> None:
        """Start as many runs as there is memory for; if the first run takes long, only that one."""
        started = self._started
        while len(started) < len(jobs):
            is_first = not _active_runs(started)
            next_jobs = jobs[len(started) :][: 1 if is_first else _SET_UP_AT_ONCE]
            while next_jobs and not is_first and not self._has_memory_for(len(next_jobs), started):
                next_jobs = next_jobs[:-1]
            if not next_jobs:
                remaining = count(len(jobs) - len(started), "more setting")
                self._print(f"no memory for {remaining} beside these runs: done afterwards")
                return
            new_runs = [VisitedRun(job, self._processes, self._end) for job in next_jobs]
            started += new_runs
            for run in new_runs:
                run.handle_answer(run.process.read_answer())
            if len(active := _active_runs(started)) == 1 and active[0].warm_up() and self._is_long(active[0]):
                self._train_to_end(active)
                return

    def _end(self, run: VisitedRun) -> None:
        """Wait for the end of a run, keep its record, and print the end; of a finished timed run only with -v."""
        run.process.wait()
        self._line.clear()
        job, record = run.job, self._loop.read(run.job)
        other_runs = _active_runs(self._started)  # they hold memory of the device and of the host
        # The run may fit alone, and is repeated in the end. When the host runs out of memory, the system kills a run.
        failure = {"out_of_memory": "found no memory", "killed": "was killed"}.get(record["status"])
        if other_runs and failure:
            folder.mark_for_retry(job.run_dir)
            print(f"{job.title} {failure} beside others, and is done again alone", flush=True)
            return
        self._records[job] = record
        if self._processes.stopped_by is not None and record["status"] == "interrupted":
            return
        if run.goes_on or is_verbose():
            print(f"\n— {job.title}", flush=True)
        if is_verbose():
            print(run.output(), end="", flush=True)
        self._print_warnings([run])
        if run.goes_on or record["status"] != "finished":
            self._loop.print_end(record, job.run_dir / LOG)

    def _show(self, text: str, now: bool = False) -> None:
        """Show the progress in the live line; `now`: even if the line has just changed."""
        if time.monotonic() >= self._sampled_at + 1:  # it takes milliseconds
            self._sampled_at = time.monotonic()
            self._programs.sample()
        if now:  # not between passes: a log may be long
            self._print_warnings(self._started)
        self._line(text, now)

    def _print(self, text: str) -> None:
        """Print a line that stays, in place of the live line."""
        self._line.clear()
        print(text, flush=True)

    def _print_warnings(self, runs: Sequence[VisitedRun]) -> None:
        """Print the new warnings of runs; with -v their whole output is printed elsewhere."""
        for text in "".join(run.output() for run in runs if not is_verbose()).splitlines():
            if text.startswith("warning: ") and text not in self._shown_warnings:
                self._shown_warnings.add(text)
                self._line.clear()
                print(text, file=sys.stderr, flush=True)

    def _has_memory_for(self, more: int, runs: Sequence[VisitedRun]) -> bool:
        """Whether a quarter of the memory is available, and `more` + 1 times what the largest of `runs` takes."""
        memory, largest = host_memory(), 0
        for run in runs:
            with contextlib.suppress(psutil.Error):  # the run has ended
                largest = max(largest, psutil.Process(run.process.program.pid).memory_info().rss)
        fits = memory.available >= max(_FREE_SHARE * memory.total, (more + 1) * largest)
        if on_device := [run for run in _active_runs(self._started) if run.device_memory]:
            largest = _CONTEXT_BYTES + max(run.device_memory["taken"] for run in on_device)
            latest = max(on_device, key=lambda run: run.answered_at).device_memory
            fits &= latest["free"] >= max(_FREE_SHARE * latest["total"], (more + 1) * largest)
        return fits

    def _is_long(self, run: VisitedRun) -> bool:
        """Whether a training is too long for others to wait for it; if so, print that. With `timing=true` none is."""
        is_short = run.fit_s is not None and run.fit_s <= _LONG_FIT_S
        if not run.goes_on or run.job.config.get("timing") is True or is_short:
            return False
        length = "is of unknown length" if run.fit_s is None else f"takes about {duration(run.fit_s)}"
        self._print(f"{run.job.title} {length}: too long for other runs to wait for it; timing=true has them wait")
        self._print(f"  its output: {relative(run.job.run_dir / LOG)}")
        return True

    def _train_to_end(self, runs: Sequence[VisitedRun]) -> None:
        """Let trainings go on to their ends, one after the other."""
        for run in runs:
            self._show(f"{run.job.title} trains", now=True)
            run.end("train")


def _active_runs(runs: Sequence[VisitedRun]) -> list[VisitedRun]:
    return [run for run in runs if not run.process.has_ended]


def _visit_limits(job: Job) -> Limits:
    """Return how long a run, and those that share its passes, are visited."""
    options = (job.config["callbacks"] or {}).get("until_known") or {}
    limits = {key: options[key] for key in ("seconds", "min_passes") if key in options}
    limits |= {} if job.seconds is None else {"seconds": job.seconds, "settles": False}
    return Limits(**limits, enough=job.config.get("enough", ENOUGH_SHARE))
