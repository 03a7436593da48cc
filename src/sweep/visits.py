"""Timed runs side by side: their processes are set up together, stay, and are visited in passes (passes.py).

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
from ..records.formatting import count
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
T = TypeVar("T")


def can_wait(config: Mapping[str, Any], devices: Path = Path("/dev"), torch: Path | None = None) -> bool:
    """Whether a run can wait for visits: one process that is timed until its rate is known, on a CPU.

    `devices` has the files of devices, and `torch` is the folder of the package, by default the installed one.
    """
    callbacks, trainer = config["callbacks"] or {}, config["trainer"]
    accelerator = trainer.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not _may_take_accelerator(devices, torch))
    timed = bool(callbacks.get("until_known")) and bool(callbacks.get("throughput"))
    return is_one_process(config) and on_cpu and timed and not trainer.get("max_time")  # which waiting would use up


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
) -> list[Job]:
    """Start as many runs as there is memory for, and visit them in passes until they have ended.

    Args:
        jobs: at most MOST_AT_ONCE are started, all with the limits of the first one.
        groups: the group of each. Its runs share passes as far as they fit.
        start: starts one.
        on_end: is called with each that has ended.
        say: is told what happens.

    Returns the jobs that were not started.
    """
    chosen = _groups_at_once([job for job in jobs if _limits_of(job) == _limits_of(jobs[0])], groups)
    say(f"preparing {count(sum(map(len, chosen)), 'setting')}")
    started: list[Process] = []
    for part in _parts_with_memory(chosen, _SET_UP_AT_ONCE, started):
        setting_up = [start(job) for job in part]
        started += setting_up
        for process in setting_up:
            if process.answer() is None:
                _end(process, on_end)
    waiting = [process for process in started if not process.ended]
    while waiting:
        warm = _warm_up(waiting, groups, on_end)
        waiting = waiting[len(warm) :]
        runs = [Visited(process, groups[process.job], on_end) for process in warm if not process.ended]
        first = int(_PASSES_PER_S * time.time())
        if runs:
            measure_in_passes(runs, _limits_of(runs[0].process.job), say=say, first_pass=first)
    begun = {process.job for process in started}
    return [job for job in jobs if job not in begun]


class Visited(Run):
    """A run with its process, and the group of runs that it is compared with."""

    def __init__(self, process: Process, group: str, on_end: Callable[[Process], None]):
        super().__init__(group, _size_of(process.job))
        self.process, self._on_end = process, on_end

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        return self.process.ask(f"go {number} {seconds}")

    @override
    def stop(self, reason: str) -> None:
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

    The first member comes alone, and in any case. A further group needs memory for all of it.
    """
    for number, rest in enumerate(groups):
        while rest:
            part = rest[: most if running else 1]
            if running and not _has_memory_for(len(rest if number else part), running):
                return
            yield part
            rest = rest[len(part) :]


def _warm_up(waiting: Sequence[Process], groups: Mapping[Job, str], on_end: Callable[[Process], None]) -> list[Process]:
    """Train what is not measured of runs, one after the other, as far as there is memory."""
    warm: list[Process] = []
    in_groups = [list(members) for _, members in itertools.groupby(waiting, lambda process: groups[process.job])]
    for (process,) in _parts_with_memory(in_groups, 1, warm):
        warm.append(process)
        if process.ask("warm up") is None:
            _end(process, on_end)
    return warm


def _end(process: Process, on_end: Callable[[Process], None]) -> None:
    process.wait()
    on_end(process)


def _limits_of(job: Job) -> Limits:
    """How long a run is visited."""
    if job.seconds is not None:
        return Limits(seconds=job.seconds, min_passes=_FEWEST, settles=False)
    options = job.config["callbacks"]["until_known"]
    known = {key: options[key] for key in ("precision", "seconds", "min_passes") if key in options}
    return Limits(**known, enough=job.config.get("enough", ENOUGH))


def _size_of(job: Job) -> int:
    return int(job.config["data"].get("batch_size", 1))


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
