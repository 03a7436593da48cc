"""Runs side by side on a device: their processes are set up together, stay, and are visited in passes (passes.py).

A timed run ends with the passes. A training then waits for its turn, and goes on to its end while no other run trains.

Runs that differ in batch size and seed alone share passes, one such group after the other. The first run, which may have to
calibrate the device, is set up alone, and the others several at a time. They warm up one after the other. A run that waits
keeps its memory, on the host and on the device: the next one warms up only if there is enough for it, and otherwise stays
set up until the runs before it have ended.
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
from ..analysis.selection import ENOUGH
from ..files import writing
from ..hardware.host_memory import host_memory
from ..hardware.programs import ProgramWatch
from ..options.ranks import ranks_asked
from ..records.formatting import count, duration
from ..records.rates import LOAD_SAID
from ..records.terminal import LiveLine, is_verbose
from ..records.values import at
from . import folder
from .passes import FEWEST, Limits, WaitingRun, measure_in_passes
from .plans import LOG, Job, Record
from .process import Process, Processes

if TYPE_CHECKING:
    from .loop import Loop

MOST_AT_ONCE = 16  # a larger sweep is measured 16 runs at a time
_SET_UP_AT_ONCE = min(4, os.cpu_count() or 1)  # reading and checking is the work of one core
_SHARE_LEFT = 0.25  # of the memory
_CONTEXT = 2**30  # bytes of a device that a process takes beside its tensors: CUDA's context, the libraries' workspaces
_PASSES_PER_S = 1000  # more than there can be: passes of another time in the same folder have other numbers
_SHARES = 2 * FEWEST  # of a training, one of them for each visit at most: its first update is measured in none
_LONG_S = 3600.0  # of a training: longer ones do not hold the memory of others that wait, unless they are asked to


def can_wait(config: Mapping[str, Any]) -> bool:
    """Whether a run can wait for visits: one process whose steps are measured, without a target, on a device to share."""
    callbacks, trainer = config["callbacks"] or {}, config["trainer"]
    is_measured = callbacks.get("throughput") and not trainer.get("fast_dev_run") and config.get("timing") is not False
    suits = is_measured and ranks_asked(config) == 1 and config.get("target") is None
    return bool(suits) and _can_share_device(trainer.get("accelerator", "auto"))


def _can_share_device(accelerator: str) -> bool:
    """Whether processes can wait on the device that Lightning trains on with this `trainer.accelerator`.

    They can on a CPU, and on a CUDA device whose driver does not restrict it to one process.
    """
    if accelerator == "cpu" or (accelerator == "auto" and not may_have_accelerator()):
        return True
    from ..hardware.devices import taken
    from ..hardware.nvml_readings import takes_one_process

    kind, _ = taken(accelerator)
    return (kind == "cpu" and accelerator == "auto") or (kind == "cuda" and not takes_one_process())


def is_timed(config: Mapping[str, Any]) -> bool:
    """Whether a run ends once its rate is known; otherwise it trains as long as its configuration says."""
    return bool((config["callbacks"] or {}).get("until_known"))


def to_visit(jobs: Sequence[Job]) -> list[Job]:
    """The runs that are visited: all that are timed, and of trainings with the same speed the first."""
    first: dict[str, Job] = {}
    for number, job in enumerate(jobs):
        first.setdefault(str(number) if is_timed(job.config) else _planned(job, number).speed_setting, job)
    return list(first.values())


def groups_of(jobs: Sequence[Job]) -> list[list[Job]]:
    """The runs that share passes: of several batch sizes, and with no other difference but the seed. All that have `seconds` do."""
    if any(job.seconds is not None for job in jobs):
        return [[*jobs]]
    groups = group_runs([_planned(job, number) for number, job in enumerate(jobs)]).groups
    return [[jobs[run.number] for run in group.runs] for group in groups if len({run.asked for run in group.runs}) > 1]


def _planned(job: Job, number: int) -> Run:
    """The run as a report sees it, before it has begun."""
    hardware = {"device": at(job.config, "trainer.accelerator")}
    facts = {"config": job.config, "choices": job.facts["choices"], "hardware": hardware}
    return Run(job.run_dir.name, job.run_dir, facts, number)


class Visited(WaitingRun):
    """A run in its process, which prints into the run's log. Raises WriteError where that cannot be written.

    `on_end` is told that the run ends, and waits for that.
    """

    def __init__(self, job: Job, processes: Processes, on_end: Callable[["Visited"], None]):
        super().__init__(int(job.config["data"].get("batch_size") or 1), not is_timed(job.config))
        self.job, self._on_end = job, on_end
        self.device: Mapping[str, int] = {}  # its memory, as the run saw it
        self.noted = 0.0  # when that was
        self.is_warm = False
        self.fit_s: float | None = None  # about how long a run that is warm has to train; None if unknown
        with writing("hydra.sweep.dir", job.run_dir / LOG):
            log = (job.run_dir / LOG).open("ab")
        self._before = log.tell()  # bytes of the log that are of an earlier start
        with log:  # the run has it open, and this process has not: the folder may be renamed
            self.process = processes.add(lambda: Process(job, (log.fileno(), log.fileno()), visited=True))

    @property
    def said(self) -> str:
        """What it has printed so far."""
        with contextlib.suppress(OSError), (self.job.run_dir / LOG).open(errors="replace") as log:
            log.seek(self._before)
            return log.read()
        return ""

    def note(self, facts: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Note what the run has answered; None says that it ends."""
        if facts is None:
            self._on_end(self)
        else:
            self.device, self.noted = facts.get("device") or self.device, time.monotonic()
        return facts

    def warm_up(self) -> bool:
        """Train what is not measured, unless that was done; whether the run goes on."""
        if not self.is_warm and (facts := self.note(self.process.ask("warm up"))):
            self.is_warm, self.fit_s = True, facts.get("fit_s")
        return self.is_warm

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """A training of a few seconds has shorter visits, so that it is in as many passes as a verdict needs."""
        seconds = min(seconds, (self.fit_s or math.inf) / _SHARES)
        return self.note(self.process.ask(f"go {number} {seconds}"))

    @override
    def stop(self, reason: str) -> None:
        if not self.goes_on:  # a training waits then
            self.end(f"stop {reason}")

    def end(self, order: str) -> None:
        """Have the run go on to its end, by this order, and wait for it."""
        self.process.tell(order)
        self._on_end(self)


class Together:
    """Runs that are compared, and are visited side by side.

    Their ends are in `records`, and are said as the loop says them.
    """

    def __init__(self, loop: "Loop", processes: Processes, records: dict[Job, Record]):
        self._loop, self._processes, self._records = loop, processes, records
        self._line, self._warned = LiveLine(), set[str]()
        self._programs = ProgramWatch([os.getpid()])
        self._started: list[Visited] = []

    def measure(self, jobs: Sequence[Job]) -> list[Job]:
        """Visit as many runs as there is memory for, all with the same limits, and have trainings go on to their ends.

        Returns the jobs that were not started.
        """
        chosen = [job for job in jobs if _limits_of(job) == _limits_of(jobs[0])][:MOST_AT_ONCE]
        self._say(f"preparing {count(len(chosen), 'setting')}")
        try:
            self._set_up(chosen)
            waiting = _living(self._started)
            while waiting:
                warm: list[Visited] = []
                while waiting and (not _living(warm) or self._has_memory_for(1, warm)):
                    warm.append(waiting.pop(0))
                    warm[-1].warm_up()
                long = [run for run in _living(warm) if self._is_long(run)]
                together = [run for run in _living(warm) if run not in long]
                if len(together) > 1 or any(not run.goes_on for run in together):
                    first_pass = int(_PASSES_PER_S * time.time())
                    measure_in_passes(together, _limits_of(together[0].job), say=self._say, first_pass=first_pass)
                self._train_to_end([*_living(together), *long])
            if sum(share for _, share in self._programs.top()) >= LOAD_SAID:
                self._print(f"beside these runs: {self._programs.words()} of the processor")  # in no file
        finally:
            self._line.clear()
        begun = {run.job for run in self._started}
        return [job for job in jobs if job not in begun]

    def _set_up(self, jobs: Sequence[Job]) -> None:
        """Start runs, as many as there is memory for; none beside a first one that trains for long."""
        started = self._started
        while len(started) < len(jobs):
            is_first = not _living(started)
            part = jobs[len(started) :][: 1 if is_first else _SET_UP_AT_ONCE]
            while part and not is_first and not self._has_memory_for(len(part), started):
                part = part[:-1]
            if not part:
                self._print(
                    f"no memory for {count(len(jobs) - len(started), 'more setting')} beside these: done after them"
                )
                return
            setting_up = [Visited(job, self._processes, self._end) for job in part]
            started += setting_up
            for run in setting_up:
                run.note(run.process.answer())
            if len(alone := _living(started)) == 1 and alone[0].warm_up() and self._is_long(alone[0]):
                self._train_to_end(alone)
                return

    def _end(self, run: Visited) -> None:
        """Wait for the end of a run, note it, and say it: of a timed run that has finished only where details are wanted."""
        run.process.wait()
        self._line.clear()
        job, record = run.job, self._loop.read(run.job)
        beside_others = _living(self._started)  # which hold memory of the device and of the host
        # It may fit alone, and is done so in the end. Where the host has no more memory, the system kills a run.
        why = {"out_of_memory": "found no memory", "killed": "was killed"}.get(record["status"])
        if beside_others and why:
            folder.free_for_another_try(job.run_dir)
            print(f"{job.title} {why} beside others, and is done again alone", flush=True)
            return
        self._records[job] = record
        if self._processes.stopped_by is not None and record["status"] == "interrupted":
            return
        if run.goes_on or is_verbose():
            print(f"\n— {job.title}", flush=True)
        if is_verbose():
            print(run.said, end="", flush=True)
        self._show_warnings([run])
        if run.goes_on or record["status"] != "finished":
            self._loop.say_end(record, job.run_dir / LOG)

    def _say(self, text: str, now: bool = False) -> None:
        """Say what happens, `now` also soon after something else was said."""
        self._programs.sample()
        if now:  # not between passes: a log may be long
            self._show_warnings(self._started)
        self._line(text, now)

    def _print(self, text: str) -> None:
        """Print a line that stays, in place of the one that says what happens."""
        self._line.clear()
        print(text, flush=True)

    def _show_warnings(self, runs: Sequence[Visited]) -> None:
        """Print the warnings of runs that no run has had before, unless all that they write is shown."""
        for text in "".join(run.said for run in runs if not is_verbose()).splitlines():
            if text.startswith("warning: ") and text not in self._warned:
                self._warned.add(text)
                self._line.clear()
                print(text, file=sys.stderr, flush=True)

    def _has_memory_for(self, more: int, runs: Sequence[Visited]) -> bool:
        """Whether a quarter of the memory is available, and for each run more, and one, what the largest run has taken."""
        memory, largest = host_memory(), 0
        for run in runs:
            with contextlib.suppress(psutil.Error):  # it has ended
                largest = max(largest, psutil.Process(run.process.program.pid).memory_info().rss)
        fits = memory.available >= max(_SHARE_LEFT * memory.total, (more + 1) * largest)
        if living := [run for run in _living(self._started) if run.device]:
            largest = _CONTEXT + max(run.device["taken"] for run in living)
            seen = max(living, key=lambda run: run.noted).device
            fits &= seen["free"] >= max(_SHARE_LEFT * seen["total"], (more + 1) * largest)
        return fits

    def _is_long(self, run: Visited) -> bool:
        """Whether a training is too long for others to wait for it, and say so; `timing=true` takes any."""
        if not run.goes_on or run.job.config.get("timing") is True or (run.fit_s is not None and run.fit_s <= _LONG_S):
            return False
        length = "is of unknown length" if run.fit_s is None else f"takes about {duration(run.fit_s)}"
        self._print(f"{run.job.title} {length}: no other run waits for it, to be timed; timing=true has them wait")
        self._print(f"  its output: {relative(run.job.run_dir / LOG)}")
        return True

    def _train_to_end(self, runs: Sequence[Visited]) -> None:
        """Let trainings go on, one after the other."""
        for run in runs:
            self._say(f"{run.job.title} trains", now=True)
            run.end("train")


def _living(runs: Sequence[Visited]) -> list[Visited]:
    return [run for run in runs if not run.process.ended]


def _limits_of(job: Job) -> Limits:
    """How long a run is visited, and those that are visited with it."""
    options = (job.config["callbacks"] or {}).get("until_known") or {}
    known = {key: options[key] for key in ("seconds", "min_passes") if key in options}
    known |= {} if job.seconds is None else {"seconds": job.seconds, "settles": False}
    return Limits(**known, enough=job.config.get("enough", ENOUGH))
