"""A trace of torch's profiler: recorded without its messages, read as events, and kept within a size.

The events are those of the Chrome trace that `torch.profiler` exports: times in µs, `cat` says where an event is from
(`cpu_op`, `cuda_runtime`, `kernel`). A call of CUDA and its work on the device share a correlation number.
"""

import contextlib
import gzip
import json
import os
import re
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .._torch import is_profiler_active

MAX_BYTES = 20_000_000  # of a compressed trace
_STEP = "ProfilerStep#"  # as torch names a step; viewers know the name
_CALLS = ("cuda_runtime", "cuda_driver")
_COPIES = ("gpu_memcpy", "gpu_memset")
_OUTSIDE = "no operation"
# The lines that Kineto writes to standard error, whatever its log level: `ERROR:2026-01-31 … Some.cpp:56] …`.
_KINETO = re.compile(r"^(USDT|ERROR|WARNING|INFO|STAGE|VERBOSE):\d{4}-\d\d-\d\d .*\.(cpp|h):\d+\]|profiler_kineto\.cpp")

Event = dict[str, Any]


class ProfilerUnavailableError(Exception):
    """Torch's profiler cannot be used here and now; the message says why."""


class StepProfiler:
    """Torch's profiler around some steps, without what Kineto prints.

    Call `start`, then `begin_step` and `end_step` around each step, then `stop`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._profile: profile | None = None
        self._step: record_function | None = None
        self.steps = 0

    def start(self) -> None:
        """Start; raises ProfilerUnavailableError where another profiler is active, or torch refuses."""
        if is_profiler_active():  # a second one would end the first, and crash the process when that one is read
            raise ProfilerUnavailableError("another profiler is active")
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            with _without_kineto_messages():
                # There is one cycle; without acc_events, older versions of torch warn of several.
                profiler = profile(activities=activities, record_shapes=True, acc_events=True)
                profiler.start()
        except Exception as error:  # whatever a driver or a build of torch answers
            raise ProfilerUnavailableError(f"{type(error).__name__}: {error}") from error
        self._profile = profiler

    def begin_step(self) -> None:
        """Mark the start of a step."""
        self._step = record_function(f"{_STEP}{self.steps}")
        self._step.__enter__()

    def end_step(self) -> None:
        """Mark the end of a step."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
            self.steps += 1

    def stop(self) -> dict[str, Any]:
        """Stop; returns the Chrome trace, or an empty one if the profiler was not running.

        Raises:
            ProfilerUnavailableError: if the folder for temporary files cannot take the trace, as on a full disk.
        """
        self.end_step()
        profiler, self._profile = self._profile, None
        if profiler is None:
            return {"traceEvents": []}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the kernels of the last step are part of it
        with _without_kineto_messages():
            profiler.stop()
            try:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "trace.json"
                    profiler.export_chrome_trace(str(file))
                    return json.loads(file.read_bytes().decode("utf-8", "replace"))
            except (OSError, ValueError) as error:  # Kineto itself writes as much as it can, and says nothing
                raise ProfilerUnavailableError("the folder for temporary files cannot take it") from error


def compressed(trace: Mapping[str, Any], max_bytes: int = MAX_BYTES) -> tuple[bytes, int]:
    """A trace in gzip for Perfetto with as many of its first steps as fit, and how many these are; empty if none fits."""
    spans = step_spans(trace["traceEvents"])
    count = len(spans)
    while count:
        end = spans[count][0] if count < len(spans) else float("inf")
        events = [event for event in trace["traceEvents"] if float(event.get("ts", 0)) < end]
        data = gzip.compress(json.dumps({**trace, "traceEvents": events}).encode(), compresslevel=6)
        if len(data) <= max_bytes:
            return data, count
        count = min(count - 1, count * max_bytes // len(data))
    return b"", 0


def step_spans(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Beginning and end of every step on the host, in order."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(_STEP)]
    return sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in marks)


class Call(NamedTuple):
    """An outermost operation in the trace."""

    name: str  # as the recorder has it: `aten.addmm`
    start: float
    end: float
    thread: Any
    device_us: float  # of its kernels and copies


def calls(events: Sequence[Event], names: Sequence[str] | None = None) -> list[Call]:
    """The outermost operations in the order of their starts; with `names`, the outermost ones of these."""
    wanted = None if names is None else {name.replace(".", "::", 1) for name in names}
    found = _outermost([e for e in events if e.get("cat") == "cpu_op" and (wanted is None or e["name"] in wanted)])
    launched = _launchers(events, found)
    device: dict[int, float] = defaultdict(float)
    for index, work in launched:
        if index is not None:
            device[index] += float(work["dur"])
    return [
        Call(_dotted(e["name"]), float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["tid"], device[index])
        for index, e in enumerate(found)
    ]


def device_seconds(events: Sequence[Event], names: Sequence[str]) -> tuple[list[float], float]:
    """The time of the device in each operation of a step, the mean over the steps of a trace.

    The trace and the recorder see a step's operations in the same order, so the n-th `aten.mm` of one is that of the
    other. Where their numbers differ, all calls of that name get the same share of its time.

    Args:
        events: of the trace.
        names: the operations of a step in order, as the recorder has them.

    Returns the seconds of each operation in `names`, and those of kernels that none of them launched.
    """
    starts = [start for start, _ in step_spans(events)]
    if not starts:
        return [0.0] * len(names), 0.0
    found: list[dict[str, list[float]]] = [defaultdict(list) for _ in starts]
    for call in calls(events, sorted(set(names))):
        step = bisect_right(starts, call.start) - 1
        if step >= 0:
            found[step][call.name].append(call.device_us / 1e6)
    places: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        places[name].append(index)
    seconds = [0.0] * len(names)
    for step in found:
        for name, times in step.items():
            at = places[name]
            each = times if len(times) == len(at) else [sum(times) / len(at)] * len(at)
            for index, value in zip(at, each, strict=True):
                seconds[index] += value / len(starts)
    total = sum(float(e["dur"]) for e in events if e.get("cat") == "kernel" or e.get("cat") in _COPIES) / 1e6
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
    found = _outermost([e for e in events if e.get("cat") == "cpu_op"])
    works = [
        (float(work["ts"]), float(work["ts"]) + float(work["dur"]), _name(work, None if at is None else found[at]))
        for at, work in _launchers(events, found)
        if work["cat"] == "kernel"
    ]
    if not works:
        return None
    works.sort()
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
    return _dotted(operation["name"]) if operation is not None else f"{_OUTSIDE} ({str(work['name'])[:40]})"


def _dotted(name: str) -> str:
    return name.replace("::", ".", 1)


def _outermost(operations: Sequence[Event]) -> list[Event]:
    """The events that lie in no other one of their thread, by start."""
    ends: dict[Any, float] = {}
    found = []
    for event in sorted(operations, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        start, thread = float(event["ts"]), (event["pid"], event["tid"])
        if start >= ends.get(thread, float("-inf")):
            ends[thread] = start + float(event["dur"])
            found.append(event)
    return found


def _launchers(events: Sequence[Event], operations: Sequence[Event]) -> Iterator[tuple[int | None, Event]]:
    """Every kernel and copy of the device, with the index of the operation in which the host launched it."""
    by_thread: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
    for index, event in enumerate(operations):
        start = float(event["ts"])
        by_thread[event["tid"]].append((start, start + float(event["dur"]), index))
    launches = {_correlation(e): e for e in events if e.get("cat") in _CALLS}
    for work in events:
        if work.get("cat") == "kernel" or work.get("cat") in _COPIES:
            launch = launches.get(_correlation(work))
            yield (None if launch is None else _around(by_thread[launch["tid"]], float(launch["ts"]))), work


def _around(spans: list[tuple[float, float, int]], moment: float) -> int | None:
    at = bisect_right(spans, (moment, float("inf"), 0)) - 1
    return spans[at][2] if at >= 0 and spans[at][1] >= moment else None


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


@contextlib.contextmanager
def _without_kineto_messages() -> Iterator[None]:
    """Hold back what is written to standard error meanwhile, and write it afterwards without Kineto's lines.

    Kineto reads KINETO_LOG_LEVEL when torch is imported, which is too late to set here.
    """
    try:
        sys.stderr.flush()
        own = os.dup(2)
    except (OSError, AttributeError, ValueError):  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, AttributeError, ValueError):
                sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            lines = held.read().decode("utf-8", "replace").splitlines(keepends=True)
            rest = "".join(line for line in lines if not _KINETO.search(line))
            if rest:
                os.write(2, rest.encode())
