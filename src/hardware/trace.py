"""A trace of torch's profiler over some steps, and what it says of a device: kernels by operation, and where none runs.

Events are those of the Chrome trace that `torch.profiler` exports: times in µs, `cat` says where an event is from
(`cpu_op`, `cuda_runtime`, `kernel`). A call of CUDA and its work on the device share a correlation number.
"""

import contextlib
import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from .._torch import is_profiler_active

WARMUP = 1  # steps in which the profiler runs and keeps nothing: its start takes time
_STEP = "ProfilerStep#"  # as torch names a step
_CALLS = ("cuda_runtime", "cuda_driver")
_COPIES = ("gpu_memcpy", "gpu_memset")

Event = dict[str, Any]


class StepProfiler:
    """Torch's profiler over some steps, after `WARMUP` steps: call `start`, `step` after each step, `stop`, and `trace`.

    Before `start` and after the last step, `step` and `stop` do nothing.

    Attributes:
        error: why there is no trace, in words; None where nothing has failed.
    """

    def __init__(self, device: torch.device, steps: int):
        self.error: str | None = None
        self._device, self._steps = device, steps
        self._profile: profile | None = None

    def start(self) -> None:
        """Start, unless another profiler is active: a second one would end it, and crash the process when it is read."""
        if is_profiler_active():
            self.error = "another profiler is active"
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=WARMUP, active=self._steps, repeat=1)
        with self._refusals():
            # There is one cycle; without acc_events, older versions of torch warn of several.
            self._profile = profile(activities=activities, schedule=plan, record_shapes=True, acc_events=True)
            self._profile.start()

    def step(self) -> None:
        """A step has ended. After the last one the profiler waits for the device, whose kernels belong to the trace."""
        if self._profile is not None:
            with self._refusals():
                self._profile.step()

    def stop(self) -> None:
        """End the trace, if it has not ended by itself."""
        if self._profile is not None:
            with self._refusals():
                self._profile.stop()

    def trace(self) -> dict[str, Any]:
        """The Chrome trace of what ran until `stop`; one without events where there is none."""
        if self._profile is not None:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "trace.json"
                    self._profile.export_chrome_trace(str(file))
                    return json.loads(file.read_bytes().decode("utf-8", "replace"))
            except (OSError, ValueError):  # on a full disk Kineto writes as much as it can, and says nothing
                self.error = "the folder for temporary files cannot take it"
        return {"traceEvents": []}

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a driver or a build of torch answers
            self.error, self._profile = f"{type(error).__name__}: {error}", None


def step_starts(events: Sequence[Event]) -> list[float]:
    """The beginning of every step on the host, in order."""
    marks = (e for e in events if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(_STEP))
    return sorted(float(mark["ts"]) for mark in marks)


class Call(NamedTuple):
    """An outermost operation in the trace."""

    name: str  # as the recorder has it: `aten.addmm`
    start: float
    device_us: float  # of its kernels and copies


def calls(events: Sequence[Event], names: Sequence[str] | None = None) -> list[Call]:
    """The outermost operations in the order of their starts; with `names`, the outermost ones of these."""
    found = _outermost(events, names)
    device: dict[int, float] = defaultdict(float)
    for operation, work in _works(events, found):
        device[id(operation)] += float(work["dur"])
    return [Call(_dotted(e["name"]), float(e["ts"]), device[id(e)]) for e in found]


def device_seconds(events: Sequence[Event], names: Sequence[str]) -> tuple[list[float], float]:
    """The time of the device in each operation of a step, the mean over the steps of a trace.

    The trace and the recorder see a step's operations in the same order, so the n-th `aten.mm` of one is that of the
    other. Where their numbers differ, all calls of that name get the same share of its time.

    Args:
        events: of the trace.
        names: the operations of a step in order, as the recorder has them.

    Returns the seconds of each operation in `names`, and those of kernels that none of them launched.
    """
    starts = step_starts(events)
    if not starts:
        return [0.0] * len(names), 0.0
    found: dict[tuple[int, str], list[float]] = defaultdict(list)  # step, name → seconds of its calls in order
    for call in calls(events, names):
        found[bisect_right(starts, call.start), call.name].append(call.device_us / 1e6)
    places: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        places[name].append(index)
    seconds = [0.0] * len(names)
    for (step, name), times in found.items():
        at = places[name]
        each = times if len(times) == len(at) else [sum(times) / len(at)] * len(at)
        for index, value in zip(at, each, strict=True):
            seconds[index] += value / len(starts) if step else 0.0  # 0: before the first step
    total = sum(float(work["dur"]) for _, work in _works(events, [])) / 1e6
    return seconds, max(0.0, total / len(starts) - sum(seconds))


@dataclass(frozen=True)
class Idle:
    """Where no kernel ran, from the first kernel of the trace to its last."""

    busy_us: float  # in which a kernel ran
    # (operation before, operation after) → µs of each gap between them
    gaps: dict[tuple[str, str], list[float]]


def idle(events: Sequence[Event]) -> Idle | None:
    """The time in which kernels ran, and between which operations none did; None for a trace without kernels.

    A copy is no kernel: the time of a copy that no kernel hides counts as idle, and the gap has the name of the copy.
    """
    works = sorted(
        (float(work["ts"]), float(work["ts"]) + float(work["dur"]), _name(work, operation))
        for operation, work in _works(events, _outermost(events))
        if work["cat"] == "kernel"
    )
    if not works:
        return None
    first, until, after = works[0]
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for start, end, name in works:
        if start > until:
            gaps[after, name].append(start - until)
        if end > until:
            until, after = end, name
    return Idle(until - first - sum(map(sum, gaps.values())), dict(gaps))


def _name(work: Event, operation: Event | None) -> str:
    """What a kernel is known by: the operation that launched it, or its own name."""
    return _dotted(operation["name"]) if operation else f"no operation ({str(work['name'])[:40]})"


def _dotted(name: str) -> str:
    return name.replace("::", ".", 1)


def _outermost(events: Sequence[Event], names: Sequence[str] | None = None) -> list[Event]:
    """The operations that lie in no other one of their thread, by start; with `names`, in no other one of these."""
    wanted = None if names is None else {name.replace(".", "::", 1) for name in names}
    operations = [e for e in events if e.get("cat") == "cpu_op" and (wanted is None or e["name"] in wanted)]
    ends: dict[Any, float] = {}
    found = []
    for event in sorted(operations, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        start, thread = float(event["ts"]), (event["pid"], event["tid"])
        if start >= ends.get(thread, float("-inf")):
            ends[thread] = start + float(event["dur"])
            found.append(event)
    return found


def _works(events: Sequence[Event], operations: Sequence[Event]) -> Iterator[tuple[Event | None, Event]]:
    """Every kernel and copy of the device, with the operation in which the host launched it; None for another one."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for operation in operations:
        by_thread[operation["tid"]].append(operation)
    launches = {_correlation(e): e for e in events if e.get("cat") in _CALLS}
    for work in events:
        if work.get("cat") == "kernel" or work.get("cat") in _COPIES:
            launch = launches.get(_correlation(work))
            yield (_around(by_thread[launch["tid"]], float(launch["ts"])) if launch else None), work


def _around(operations: Sequence[Event], moment: float) -> Event | None:
    """The operation of a thread that runs at a moment; they are in the order of their starts."""
    at = bisect_right(operations, moment, key=lambda e: float(e["ts"])) - 1
    return operations[at] if at >= 0 and float(operations[at]["ts"]) + float(operations[at]["dur"]) >= moment else None


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")
