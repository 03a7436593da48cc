"""Runs side by side on a device: their processes are set up together, stay, and are visited in passes (passes.py).

A timed run ends with the passes. A training then waits for its turn, and goes on to its end while no other run trains.

Runs that differ in batch size and seed alone share passes, one such group after the other. The first run, which may have to
calibrate the device, is set up alone, and the others several at a time. They warm up one after the other. A run that waits
keeps its memory, on the host and on the device: the next one warms up only if there is enough for it, and otherwise stays
set up until the runs before it have ended.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
from typing_extensions import override

from .._system import may_have_accelerator
from ..analysis.groups import group_runs
from ..analysis.run import Run
from ..analysis.selection import ENOUGH
from ..hardware.host_memory import host_memory
from ..options.update import ranks_asked
from ..records.formatting import count, duration
from ..records.values import at
from .passes import Limits, WaitingRun, measure_in_passes
from .plans import Job
from .process import Process

MOST_AT_ONCE = 16  # a larger sweep is measured 16 runs at a time
_SET_UP_AT_ONCE = min(4, os.cpu_count() or 1)  # reading and checking is the work of one core
_SHARE_LEFT = 0.25  # of the memory
_CONTEXT = 2**30  # bytes of a device that a process takes beside its tensors: CUDA's context, the libraries' workspaces
_PASSES_PER_S = 1000  # more than there can be: passes of another time in the same folder have other numbers
_FEWEST = 8  # passes of runs that have so many seconds
_LONG_S = 3600.0  # of a training: longer ones do not hold the memory of others that wait, unless they are asked to


def can_wait(config: Mapping[str, Any]) -> bool:
    """Whether a run can wait for visits: one process whose steps are measured, that no time limit ends, on a device to share."""
    callbacks, trainer = config["callbacks"] or {}, config["trainer"]
    is_measured = callbacks.get("throughput") and not trainer.get("fast_dev_run") and config.get("timing") is not False
    suits = is_measured and ranks_asked(config) == 1 and not _has_clock(config)
    return bool(suits) and _can_share_device(trainer.get("accelerator", "auto"))


def _has_clock(config: Mapping[str, Any]) -> bool:
    """Whether the time decides when a run ends or is validated: waiting would use it up."""
    trainer, nodes = config["trainer"], (config["callbacks"] or {}).values()
    timers = [node for node in nodes if isinstance(node, Mapping) and str(node.get("_target_")).endswith(".Timer")]
    is_due = isinstance(trainer.get("val_check_interval"), str | Mapping)  # a time
    return bool(timers or is_due or trainer.get("max_time") or config.get("target") is not None)


def _can_share_device(accelerator: str) -> bool:
    """Whether processes can wait on the device that Lightning trains on with this `trainer.accelerator`.

    They can on a CPU, and on a CUDA device whose driver does not restrict it to one process.
    """
    if accelerator == "cpu" or (accelerator == "auto" and not may_have_accelerator()):
        return True
    from ..hardware.devices import available
    from ..hardware.nvml_readings import takes_one_process

    found = available()
    if accelerator == "auto" and found == ["cpu"]:
        return True
    return accelerator in ("auto", "gpu", "cuda") and "cuda" in found and not takes_one_process()


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
    """The runs that share passes: those that differ in batch size and seed alone. All that have `seconds` do."""
    compared = [job for job in jobs if job.seconds is None]
    groups = group_runs([_planned(job, number) for number, job in enumerate(compared)]).groups
    return [
        [job for job in jobs if job.seconds is not None],
        *([compared[run.number] for run in group.runs] for group in groups),
    ]


def _planned(job: Job, number: int) -> Run:
    """The run as a report sees it, before it has begun."""
    hardware = {"device": at(job.config, "trainer.accelerator")}
    facts = {"config": job.config, "choices": job.facts["choices"], "hardware": hardware}
    return Run(job.run_dir.name, job.run_dir, facts, number)


class Together:
    """Runs that are compared, and are visited side by side.

    `end` waits for the end of a run, and notes how it ended; it is told whether others held memory of the device then. `say` is
    told what happens; with `stays` it is a line that remains to be read.
    """

    def __init__(self, start: Callable[[Job], Process], end: Callable[[Process, bool], None], say: Callable[..., None]):
        self._start, self._on_end, self._say = start, end, say
        self._started: list[Process] = []
        self._fit_s: dict[Process, float | None] = {}  # about how long a run that is warm has to train; None if unknown
        self._device: dict[Process, Mapping[str, int]] = {}  # its memory, as each run saw it; the last one saw it last

    def measure(self, jobs: Sequence[Job]) -> list[Job]:
        """Visit as many runs as there is memory for, all with the same limits, and have trainings go on to their ends.

        Returns the jobs that were not started.
        """
        chosen = [job for job in jobs if _limits_of(job) == _limits_of(jobs[0])][:MOST_AT_ONCE]
        self._say(f"preparing {count(len(chosen), 'setting')}")
        started = self._started = []
        while len(started) < len(chosen):
            is_first = not _living(started)
            part = chosen[len(started) :][: 1 if is_first else _SET_UP_AT_ONCE]
            if not is_first and not self._has_memory_for(len(part), started):
                break
            setting_up = [self._start(job) for job in part]
            started += setting_up
            for process in setting_up:
                self._note(process, process.answer())
            if len(alone := _living(started)) == 1 and self._warm(alone[0]) and self._is_long(alone[0]):
                self._train_to_end(alone)  # the others are not set up meanwhile
                break
        waiting = _living(started)
        while waiting:
            warm: list[Process] = []
            while waiting and (not _living(warm) or self._has_memory_for(1, warm)):
                warm.append(waiting.pop(0))
                self._warm(warm[-1])
            long = [process for process in _living(warm) if self._is_long(process)]
            together = [process for process in _living(warm) if process not in long]
            self._visit(together)
            self._train_to_end([*_living(together), *long])
        begun = {process.job for process in started}
        return [job for job in jobs if job not in begun]

    def _warm(self, process: Process) -> bool:
        """Train what is not measured of a run, unless that was done; whether the run goes on."""
        if process not in self._fit_s:
            facts = self._note(process, process.ask("warm up"))
            if facts is None:
                return False
            self._fit_s[process] = facts.get("fit_s")
        return True

    def _note(self, process: Process, facts: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Note what a run says of its device; None says that it ends."""
        if facts is None:
            self._end(process)
        elif device := facts.get("device"):
            self._device.pop(process, None)
            self._device[process] = device
        return facts

    def _end(self, process: Process) -> None:
        others = [one for one in _living(self._started) if one is not process and one in self._device]
        self._on_end(process, bool(others))
        self._device.pop(process, None)

    def _has_memory_for(self, more: int, processes: Sequence[Process]) -> bool:
        """Whether a quarter of the memory is available, and for each run more, and one, what the largest run has taken."""
        memory, largest = host_memory(), 0
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it has ended
                largest = max(largest, psutil.Process(process.pid).memory_info().rss)
        fits = memory.available >= max(_SHARE_LEFT * memory.total, (more + 1) * largest)
        if device := list(self._device.values()):
            largest = _CONTEXT + max(each["taken"] for each in device)
            fits &= device[-1]["free"] >= max(_SHARE_LEFT * device[-1]["total"], (more + 1) * largest)
        return fits

    def _is_long(self, process: Process) -> bool:
        """Whether a training is too long for others to wait for it, and say so; `timing=true` takes any."""
        config, fit_s = process.job.config, self._fit_s[process]
        if is_timed(config) or config.get("timing") is True or (fit_s is not None and fit_s <= _LONG_S):
            return False
        length = "is of unknown length" if fit_s is None else f"takes about {duration(fit_s)}"
        said = f"{process.job.title} {length}: no other run waits for it, to be timed; timing=true has them wait"
        self._say(said, stays=True)
        return True

    def _visit(self, processes: Sequence[Process]) -> None:
        """Visit timed runs, and trainings where there are several."""
        runs = [Visited(process, self._end) for process in processes]
        if len(runs) > 1 or any(not run.goes_on for run in runs):
            first_pass = int(_PASSES_PER_S * time.time())
            measure_in_passes(runs, _limits_of(processes[0].job), say=self._say, first_pass=first_pass)

    def _train_to_end(self, processes: Sequence[Process]) -> None:
        """Let trainings go on, one after the other."""
        for process in processes:
            self._say(f"{process.job.title} trains", now=True)
            process.tell("train")
            self._end(process)


class Visited(WaitingRun):
    """A run with its process."""

    def __init__(self, process: Process, on_end: Callable[[Process], None]):
        super().__init__(int(process.job.config["data"].get("batch_size") or 1), not is_timed(process.job.config))
        self.process, self._on_end = process, on_end

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        facts = self.process.ask(f"go {number} {seconds}")
        if facts is None:
            self._on_end(self.process)
        return facts

    @override
    def stop(self, reason: str) -> None:
        if not self.goes_on:  # a training waits then
            self.process.tell(f"stop {reason}")
            self._on_end(self.process)


def _living(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if not process.ended]


def _limits_of(job: Job) -> Limits:
    """How long a run is visited, and those that are visited with it."""
    if job.seconds is not None:
        return Limits(seconds=job.seconds, min_passes=_FEWEST, settles=False)
    options = (job.config["callbacks"] or {}).get("until_known") or {}
    known = {key: options[key] for key in ("precision", "seconds", "min_passes") if key in options}
    return Limits(**known, enough=job.config.get("enough", ENOUGH))
