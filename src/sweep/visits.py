"""Runs side by side: their processes are set up together, stay, and are visited in passes (passes.py).

A timed run ends with the passes. A training then waits for its turn, and goes on to its end while no other run trains.

Runs that a report compares share passes: they are started together, and before runs of other groups. Runs are set up after
the first one alone, which may have to calibrate the device, several at a time. They warm up one after the other. A run waits
with its memory. The next one warms up only while there is enough for it; it waits, set up, until the runs before it have ended.
"""

import contextlib
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import psutil
from typing_extensions import override

from ..analysis.groups import group_runs
from ..analysis.run import Run as RecordedRun
from ..analysis.selection import ENOUGH
from ..hardware.host_memory import host_memory
from ..records.formatting import count, duration
from .passes import Limits, Run, measure_in_passes
from .plans import Job, is_one_process
from .process import Process

MOST_AT_ONCE = 16  # a larger sweep is measured 16 runs at a time
_SET_UP_AT_ONCE = min(4, os.cpu_count() or 1)  # reading and checking is the work of one core
_SHARE_LEFT = 0.25  # of the memory
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg", "davinci[0-9]*")  # in /dev: Lightning's `auto` would take them
_BUILD = re.compile(r"^(?:cuda|hip|rocm)\b.*= *(\S+)", re.MULTILINE)  # `cuda: Optional[str] = None` in torch/version.py
_PASSES_PER_S = 1000  # more than there can be: passes of another time in the same folder have other numbers
_FEWEST = 8  # passes of runs that have so many seconds
_LONG_S = 3600.0  # of a training: longer ones do not hold the memory of others that wait, unless they are asked to
T = TypeVar("T")


def can_wait(config: Mapping[str, Any], devices: Path = Path("/dev"), torch: Path | None = None) -> bool:
    """Whether a run can wait for visits: one process on a CPU, whose steps are measured, and that no time limit ends.

    `devices` has the files of devices, and `torch` is the folder of the package, by default the installed one.
    """
    callbacks, trainer = config["callbacks"] or {}, config["trainer"]
    accelerator = trainer.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not _may_take_accelerator(devices, torch))
    measured = bool(callbacks.get("throughput")) and not trainer.get("fast_dev_run")
    return (
        is_one_process(config) and on_cpu and measured and not _has_clock(config) and config.get("timing") is not False
    )


def _has_clock(config: Mapping[str, Any]) -> bool:
    """Whether the time decides when a run ends or is validated: waiting would use it up."""
    trainer, callbacks = config["trainer"], config["callbacks"] or {}
    timers = (str(node.get("_target_")) for node in callbacks.values() if isinstance(node, Mapping))
    is_due = isinstance(trainer.get("val_check_interval"), str | Mapping)  # a time
    ends = trainer.get("max_time") or config.get("target") is not None or any(t.endswith(".Timer") for t in timers)
    return bool(is_due or ends)


def is_timed(config: Mapping[str, Any]) -> bool:
    """Whether a run ends once its rate is known; otherwise it trains as long as its configuration says."""
    return bool((config["callbacks"] or {}).get("until_known"))


def to_visit(jobs: Sequence[Job]) -> list[Job]:
    """The runs that are visited: all that are timed, and of trainings with the same speed the first."""
    first: dict[str, Job] = {}
    for number, job in enumerate(jobs):
        first.setdefault(str(number) if is_timed(job.config) else _planned(job, number).speed_setting, job)
    return list(first.values())


def _may_take_accelerator(devices: Path, torch: Path | None) -> bool:
    """Whether Lightning's `auto` may take an accelerator: one is there, and torch is not built for CPUs alone."""
    if not any(any(devices.glob(name)) for name in _ACCELERATORS):
        return False
    if torch is None:
        spec = find_spec("torch")  # to import it takes seconds
        torch = Path(str(spec and spec.origin)).parent
    return not _is_cpu_build(torch)


def _is_cpu_build(torch: Path) -> bool:
    """Whether `version.py` of torch, which is read and not run, says that it has no CUDA and no ROCm."""
    with contextlib.suppress(OSError, ValueError):
        builds = _BUILD.findall((torch / "version.py").read_text(encoding="utf-8"))
        return bool(builds) and set(builds) == {"None"}
    return False


def groups_of(jobs: Sequence[Job]) -> dict[Job, str]:
    """The group of each run, within which runs are compared: as a report groups them, or its own if it has `seconds`."""
    compared = [job for job in jobs if job.seconds is None]
    found = {job: str(job.run_dir) for job in jobs}
    for group in group_runs([_planned(job, number) for number, job in enumerate(compared)]).groups:
        found |= {compared[run.number]: str(group.number) for run in group.runs}
    return found


def measure_together(
    jobs: Sequence[Job],
    groups: Mapping[Job, str],
    start: Callable[[Job], Process],
    on_end: Callable[[Process], None],
    say: Callable[[str], None],
    note: Callable[[str], None] = print,
) -> list[Job]:
    """Start as many runs as there is memory for, visit them in passes, and have trainings go on to their ends.

    Args:
        jobs: at most MOST_AT_ONCE are started, all with the limits of the first one.
        groups: the group of each. Its runs share passes as far as they fit.
        start: starts one.
        on_end: is called with each that has ended.
        say: is told what happens.
        note: is told what stays to be read.

    Returns the jobs that were not started.
    """
    chosen = _groups_at_once([job for job in jobs if _kind_of(job) == _kind_of(jobs[0])], groups)
    say(f"preparing {count(sum(map(len, chosen)), 'setting')}")
    started: list[Process] = []
    for part in _parts_with_memory(chosen, _SET_UP_AT_ONCE, started):
        setting_up = [start(job) for job in part]
        started += setting_up
        for process in setting_up:
            if process.answer() is None:
                _end(process, on_end)
        if len(_living(started)) == 1 and _has_long(started, on_end, note):
            _train_to_end(_living(started), on_end, say)  # the others are not set up meanwhile
            break
    waiting = _living(started)
    while waiting:
        warm = _warm_up(waiting, groups, on_end)
        waiting = waiting[len(warm) :]
        runs = [Visited(process, groups[process.job], on_end) for process in _living(warm)]
        if runs and (not runs[0].goes_on or (len(runs) > 1 and not _has_long(warm, on_end, note))):
            first = int(_PASSES_PER_S * time.time())
            measure_in_passes(runs, _kind_of(runs[0].process.job)[0], say=say, first_pass=first)
        _train_to_end(_living(warm), on_end, say)
    begun = {process.job for process in started}
    return [job for job in jobs if job not in begun]


def _living(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if not process.ended]


def _has_long(processes: Sequence[Process], on_end: Callable[[Process], None], note: Callable[[str], None]) -> bool:
    """Whether a training is too long for others to wait for it; `timing=true` takes any."""
    for process in _living(processes):
        config = process.job.config
        if is_timed(config) or config.get("timing") is True or not _make_warm(process, on_end):
            continue
        if process.fit_s is None or process.fit_s > _LONG_S:
            length = "is of unknown length" if process.fit_s is None else f"takes about {duration(process.fit_s)}"
            note(f"{process.job.title} {length}: no other run waits for it, to be timed; timing=true has them wait")
            return True
    return False


def _train_to_end(processes: Sequence[Process], on_end: Callable[[Process], None], say: Callable[[str], None]) -> None:
    """Let trainings go on, one after the other, and say where they are."""
    for process in processes:
        if not process.ended:
            process.tell("train")
            while (facts := process.answer()) is not None:
                say(f"{process.job.title} · {facts.get('progress', '')}")
            _end(process, on_end)


class Visited(Run):
    """A run with its process, and the group of runs that it is compared with."""

    def __init__(self, process: Process, group: str, on_end: Callable[[Process], None]):
        super().__init__(group, _size_of(process.job), goes_on=not is_timed(process.job.config))
        self.process, self._on_end = process, on_end

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        return self.process.ask(f"go {number} {seconds}")

    @override
    def stop(self, reason: str) -> None:
        """See Run. A training waits then."""
        if not self.goes_on or not reason:
            self.process.tell(f"stop {reason}")
            _end(self.process, self._on_end)


def _groups_at_once(jobs: Sequence[Job], groups: Mapping[Job, str]) -> list[list[Job]]:
    """As many groups as fit in MOST_AT_ONCE, the first of them in any case: of a larger one as many runs."""
    chosen: list[list[Job]] = []
    for name in dict.fromkeys(groups[job] for job in jobs):
        members = _each_size_first([job for job in jobs if groups[job] == name])[:MOST_AT_ONCE]
        if sum(map(len, chosen)) + len(members) <= MOST_AT_ONCE:
            chosen.append(members)
    return chosen


def _each_size_first(members: Sequence[Job]) -> list[Job]:
    """The runs of a group: one of each batch size, then their first repeats, and so on."""
    seen = Counter[int]()
    rounds: dict[Job, int] = {}
    for job in members:
        rounds[job] = seen[_size_of(job)]
        seen[_size_of(job)] += 1
    return sorted(members, key=rounds.__getitem__)


def _parts_with_memory(groups: Sequence[Sequence[T]], most: int, running: Sequence[Process]) -> Iterator[Sequence[T]]:
    """Parts of groups, of at most so many members, while there is memory for them beside the runs that are `running`.

    The first member that lives comes alone, and in any case. A further group needs memory for all of it.
    """
    for number, rest in enumerate(groups):
        while rest:
            is_first = not _living(running)
            part = rest[: 1 if is_first else most]
            if not is_first and not _has_memory_for(len(rest if number else part), running):
                return
            yield part
            rest = rest[len(part) :]


def _warm_up(waiting: Sequence[Process], groups: Mapping[Job, str], on_end: Callable[[Process], None]) -> list[Process]:
    """Train what is not measured of runs, one after the other, as far as there is memory."""
    warm: list[Process] = []
    in_groups = [list(members) for _, members in itertools.groupby(waiting, lambda process: groups[process.job])]
    for (process,) in _parts_with_memory(in_groups, 1, warm):
        warm.append(process)
        _make_warm(process, on_end)
    return warm


def _make_warm(process: Process, on_end: Callable[[Process], None]) -> bool:
    """Train what is not measured of a run, unless that was done; whether the run goes on, which notes its length."""
    if not process.is_warm:
        facts = process.ask("warm up")
        if facts is None:
            _end(process, on_end)
            return False
        process.is_warm, process.fit_s = True, facts.get("fit_s")
    return True


def _end(process: Process, on_end: Callable[[Process], None]) -> None:
    process.wait()
    on_end(process)


def _kind_of(job: Job) -> tuple[Limits, bool]:
    """How long a run is visited, and whether it is timed: of one kind are runs that are visited together."""
    if job.seconds is not None:
        return Limits(seconds=job.seconds, min_passes=_FEWEST, settles=False), True
    options = (job.config["callbacks"] or {}).get("until_known") or {}
    known = {key: options[key] for key in ("precision", "seconds", "min_passes") if key in options}
    return Limits(**known, enough=job.config.get("enough", ENOUGH)), is_timed(job.config)


def _size_of(job: Job) -> int:
    return int(job.config["data"].get("batch_size") or 1)


def _planned(job: Job, number: int) -> RecordedRun:
    """The run as a report sees it, before it has begun."""
    return RecordedRun(job.run_dir.name, job.run_dir, {"config": job.config, "choices": job.facts["choices"]}, number)


def _has_memory_for(more: int, processes: Sequence[Process]) -> bool:
    """Whether a quarter of the memory is available, and for each run more, and one, what the largest run has taken."""
    memory = host_memory()
    largest = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            largest = max(largest, psutil.Process(process.pid).memory_info().rss)
    return memory.available >= max(_SHARE_LEFT * memory.total, (more + 1) * largest)
