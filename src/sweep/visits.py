"""Timed runs side by side: their processes are set up together, stay, and are visited in passes (passes.py).

Runs are set up after the first one alone, which may have to calibrate the device, several at a time. They warm up one after
the other. A run waits with its memory. The next one warms up only while there is enough for it; it waits, set up, until the
runs before it have ended.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from typing_extensions import override

from ..analysis.selection import ENOUGH
from ..hardware.host_memory import host_memory
from ..records.formatting import count
from .passes import Limits, Run, measure_in_passes
from .plans import Job, is_one_process
from .process import Process

MOST_AT_ONCE = 16  # a larger sweep is measured 16 runs at a time; runs of different groups share no passes
_SET_UP_AT_ONCE = min(4, os.cpu_count() or 1)  # reading and checking is the work of one core
_SHARE_LEFT = 0.25  # of the memory
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg", "davinci[0-9]*")  # in /dev: Lightning's `auto` would take them
_BUILD = re.compile(r"^(?:cuda|hip|rocm)\b.*= *(\S+)", re.MULTILINE)  # `cuda: Optional[str] = None` in torch/version.py
_PASSES_PER_S = 1000  # more than there can be: passes of another time in the same folder have other numbers
_FEWEST = 8  # passes of runs that have so many seconds
_NOT_COMPARED = ("data.batch_size=", "seed=", "optimizer.")  # overrides


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


def measure_together(
    jobs: Sequence[Job],
    start: Callable[[Job], Process],
    on_end: Callable[[Process], None],
    say: Callable[[str], None],
) -> list[Job]:
    """Start as many runs as there is memory for, and visit them in passes until they have ended.

    Args:
        jobs: at most MOST_AT_ONCE are started, all with the limits of the first one.
        start: starts one.
        on_end: is called with each that has ended.
        say: is told what happens.

    Returns the jobs that were not started.
    """
    alike = [job for job in jobs if _limits_of(job) == _limits_of(jobs[0])]
    say(f"preparing {count(len(alike), 'setting')}")
    started: list[Process] = []
    for group in (alike[:1], *_batched(alike[1:MOST_AT_ONCE], _SET_UP_AT_ONCE)):
        if started and not _has_memory_for(len(group), started):
            break
        setting_up = [start(job) for job in group]
        started += setting_up
        for process in setting_up:
            if process.answer() is None:
                _end(process, on_end)
    waiting = [process for process in started if not process.ended]
    while waiting:
        warm = _warm_up(waiting, on_end)
        waiting = waiting[len(warm) :]
        runs = [Visited(process, on_end) for process in warm if not process.ended]
        first = int(_PASSES_PER_S * time.time())
        if runs:
            measure_in_passes(runs, _limits_of(runs[0].process.job), say=say, first_pass=first)
    return [job for job in jobs if job not in alike[: len(started)]]


class Visited(Run):
    """A run with its process."""

    def __init__(self, process: Process, on_end: Callable[[Process], None]):
        super().__init__(*_setting(process.job))
        self.process, self._on_end = process, on_end

    @override
    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        return self.process.ask(f"go {number} {seconds}")

    @override
    def stop(self, reason: str) -> None:
        self.process.tell(f"stop {reason}")
        _end(self.process, self._on_end)


def _batched(jobs: Sequence[Job], most: int) -> Iterator[Sequence[Job]]:
    return (jobs[first : first + most] for first in range(0, len(jobs), most))


def _warm_up(waiting: Sequence[Process], on_end: Callable[[Process], None]) -> list[Process]:
    """Train what is not measured of runs, one after the other, as far as there is memory: of the first one in any case."""
    warm: list[Process] = []
    for process in waiting:
        if warm and not _has_memory_for(1, warm):
            break
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


def _setting(job: Job) -> tuple[str, int]:
    """The group within which runs are compared (all options but batch size, seed and optimizer), and the batch size."""
    if job.seconds is not None:
        return str(job.run_dir), 1
    words = [word for word in job.facts["overrides"] if not word.lstrip("+").startswith(_NOT_COMPARED)]
    return " ".join(sorted(words)), int(job.config["data"].get("batch_size", 1))


def _has_memory_for(more: int, processes: Sequence[Process]) -> bool:
    """Whether a quarter of the memory is available, and for each run more, and one, what the largest run has taken."""
    memory = host_memory()
    largest = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            largest = max(largest, psutil.Process(process.pid).memory_info().rss)
    return memory.available >= max(_SHARE_LEFT * memory.total, (more + 1) * largest)
