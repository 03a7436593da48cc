"""A trace of torch's profiler over some steps: the device time of each operation, and the time in which no kernel runs.

Events are those of the Chrome trace that `torch.profiler` exports: times are in µs, and `cat` is the category of an event
(`cpu_op`, `cuda_runtime`, `kernel`). A CUDA call and its work on the device have the same correlation number.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from .._torch import is_profiler_active

WARMUP = 1  # steps that the profiler runs in and discards: its start takes time
_STEP = "ProfilerStep#"  # torch's name of a step, before its number
_API_CATEGORIES = ("cuda_runtime", "cuda_driver")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]


class StepProfiler:
    """Torch's profiler over some steps, after `WARMUP` steps: call `start`, `step` after each step, `stop`, and `trace`.

    Before `start` and after the last step, `step` and `stop` do nothing.

    Attributes:
        error: why there is no trace, in words; None without an error.
    """

    def __init__(self, device: torch.device, steps: int):
        self.error: str | None = None
        self._device, self._steps = device, steps
        self._profile: profile | None = None

    def start(self) -> None:
        """Start, unless another profiler is active: a second one would stop the first, and reading the first would crash."""
        if self._profile is not None:  # started already, before a batch that was left out
            return
        if is_profiler_active():
            self.error = "another profiler is active"
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=WARMUP, active=self._steps, repeat=1)
        # There is one cycle, but without acc_events older versions of torch warn about several.
        self._profile = profile(activities=activities, schedule=plan, record_shapes=True, acc_events=True)
        self._call("start")

    def step(self) -> None:
        """Mark the end of a step. After the last step the profiler waits for the device, whose kernels belong to the trace."""
        self._call("step")

    def stop(self) -> None:
        """End the trace, if it has not ended after its last step."""
        self._call("stop")

    def trace(self) -> dict[str, Any]:
        """Return the Chrome trace of the steps; one without events if there is no trace."""
        if self._profile is not None:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "trace.json"
                    self._profile.export_chrome_trace(str(file))
                    return json.loads(file.read_bytes().decode("utf-8", "replace"))
            except (OSError, ValueError):  # on a full disk Kineto writes a part, and reports nothing
                self.error = "the folder for temporary files cannot take it"
        return {"traceEvents": []}

    def _call(self, method: str) -> None:
        try:
            if self._profile is not None:
                getattr(self._profile, method)()
        except Exception as error:  # noqa: BLE001 - a driver or a build of torch may raise anything
            self.error, self._profile = f"{type(error).__name__}: {error}", None


def step_starts(events: Sequence[Event]) -> list[float]:
    """Return the start of every step on the host in µs, in order."""
    marks = (e for e in events if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(_STEP))
    return sorted(float(mark["ts"]) for mark in marks)


def device_seconds(events: Sequence[Event], names: Sequence[str]) -> tuple[list[float], float]:
    """Return the device seconds of each operation of a step, as means over the steps of a trace, and those of other kernels.

    The trace and the recorder have a step's operations in the same order, so the n-th `aten.mm` in both is the same call. If
    their numbers differ, all calls of that name get the same share of its time. The copy of a batch does not count, since it
    precedes the recorded step: it is a copy from the host by no operation, or by the first of too many calls.

    Args:
        events: of the trace.
        names: the recorded operations of a step, in order.
    """
    starts = step_starts(events)
    if not starts:
        return [0.0] * len(names), 0.0
    operations, works = _make_frames(events, names)
    is_host_copy = works["name"].str.startswith("Memcpy HtoD")
    host_copies = {*works["operation"][is_host_copy]} - {*works["operation"][~is_host_copy]}
    works = works[~is_host_copy | (works["operation"] >= 0)]
    operations["seconds"] = works.groupby("operation")["dur"].sum().reindex(operations.index, fill_value=0.0) / 1e6
    operations["step"] = numpy.searchsorted(starts, operations["ts"], "right")
    seconds = numpy.zeros(len(names))
    excluded: list[int] = []  # rows
    for (step, name), calls in operations.groupby(["step", "name"]):
        indices = [index for index, other in enumerate(names) if other == name]
        batch_copies = calls.index[calls.index.isin(host_copies)][: max(0, len(calls) - len(indices))]
        excluded, calls = [*excluded, *batch_copies], calls.drop(batch_copies)
        times = calls["seconds"] if len(calls) == len(indices) else calls["seconds"].sum() / len(indices)
        seconds[indices] += times / len(starts) if step else 0.0  # 0: before the first step
    total = works["dur"][~works["operation"].isin(excluded)].sum() / 1e6 / len(starts)
    return seconds.tolist(), max(0.0, float(total - seconds.sum()))


def busy_us(events: Sequence[Event]) -> float | None:
    """Return the µs in which a kernel ran; None for a trace without kernels. A copy is not a kernel."""
    kernels = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") == "kernel")
    if not kernels:
        return None
    busy, until = 0.0, kernels[0][0]
    for start, end in kernels:
        busy, until = busy + max(0.0, end - max(start, until)), max(end, until)
    return busy


def _make_frames(events: Sequence[Event], names: Sequence[str]) -> tuple[Any, Any]:
    """Return the outermost operations of these names, by start, and the device's kernels and copies.

    Both are pandas frames with `cat`, `name`, `tid`, `ts`, `dur` and `end`. The column `operation` of the second frame is the
    row of the operation in which the host launched the work; -1 for none.
    """
    import pandas as pd  # its import takes a third of a second, which only a trace of a GPU needs

    keys = ("cat", "name", "tid", "ts", "dur")
    kept_events = [event for event in events if event.get("cat") in ("cpu_op", *_API_CATEGORIES, *_DEVICE_WORK)]
    frame = pd.DataFrame({key: [event.get(key) for event in kept_events] for key in keys})
    frame = frame.astype({"cat": str, "name": str, "tid": str, "ts": float, "dur": float})
    frame["end"] = frame["ts"] + frame["dur"]
    frame["launch"] = [event.get("args", {}).get("correlation", -1) for event in kept_events]
    operations = frame[frame["cat"] == "cpu_op"].sort_values(["ts", "end"], ascending=[True, False])
    operations["name"] = operations["name"].str.replace("::", ".", n=1, regex=False)
    operations = operations[operations["name"].isin(names)]
    latest_end = operations.groupby("tid")["end"].cummax().groupby(operations["tid"]).shift(fill_value=-numpy.inf)
    operations = operations[operations["ts"] >= latest_end].reset_index(drop=True)
    launches = frame[frame["cat"].isin(_API_CATEGORIES) & (frame["launch"] >= 0)]
    launches = launches.drop_duplicates("launch").set_index("launch")[["ts", "tid"]]
    works = frame[frame["cat"].isin(_DEVICE_WORK)].join(launches.add_prefix("host_"), on="launch")
    works = works.reset_index(drop=True)
    launched_work = works.dropna(subset="host_ts").sort_values("host_ts").reset_index()
    columns = operations[["ts", "tid", "end"]].add_prefix("host_").assign(operation=operations.index)
    matches = pd.merge_asof(launched_work[["index", "host_ts", "host_tid"]], columns, on="host_ts", by="host_tid")
    enclosing = matches[matches["host_end"] >= matches["host_ts"]].set_index("index")["operation"]
    return operations, works.assign(operation=enclosing.reindex(works.index, fill_value=-1).astype(int))
