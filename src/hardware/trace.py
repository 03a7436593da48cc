"""A trace of torch's profiler over some steps, and what it says of a device: kernels by operation, and for how long none runs.

Events are those of the Chrome trace that `torch.profiler` exports: times in µs, `cat` says where an event is from
(`cpu_op`, `cuda_runtime`, `kernel`). A call of CUDA and its work on the device share a correlation number.
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

WARMUP = 1  # steps in which the profiler runs and keeps nothing: its start takes time
_STEP = "ProfilerStep#"  # as torch names a step
_CALLS = ("cuda_runtime", "cuda_driver")
_WORKS = ("kernel", "gpu_memcpy", "gpu_memset")

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
        if self._profile is not None:  # a batch that was left out after the start
            return
        if is_profiler_active():
            self.error = "another profiler is active"
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=WARMUP, active=self._steps, repeat=1)
        # There is one cycle; without acc_events, older versions of torch warn of several.
        self._profile = profile(activities=activities, schedule=plan, record_shapes=True, acc_events=True)
        self._call("start")

    def step(self) -> None:
        """A step has ended. After the last one the profiler waits for the device, whose kernels belong to the trace."""
        self._call("step")

    def stop(self) -> None:
        """End the trace, if it has not ended by itself."""
        self._call("stop")

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

    def _call(self, method: str) -> None:
        try:
            if self._profile is not None:
                getattr(self._profile, method)()
        except Exception as error:  # noqa: BLE001 - whatever a driver or a build of torch answers
            self.error, self._profile = f"{type(error).__name__}: {error}", None


def step_starts(events: Sequence[Event]) -> list[float]:
    """The beginning of every step on the host, in order."""
    marks = (e for e in events if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(_STEP))
    return sorted(float(mark["ts"]) for mark in marks)


def device_seconds(events: Sequence[Event], names: Sequence[str]) -> tuple[list[float], float]:
    """The time of the device in each operation of a step, the mean over the steps of a trace.

    The trace and the recorder see a step's operations in the same order, so the n-th `aten.mm` of one is that of the
    other. Where their numbers differ, all calls of that name get the same share of its time. The copy of a batch is left
    out, as it comes before the recorded step: a copy from the host by no operation, or by the first of too many calls.

    Args:
        events: of the trace.
        names: the operations of a step in order, as the recorder has them.

    Returns the seconds of each operation in `names`, and those of kernels that none of them launched.
    """
    starts = step_starts(events)
    if not starts:
        return [0.0] * len(names), 0.0
    operations, works = _frames(events, names)
    is_load = works["name"].str.startswith("Memcpy HtoD")
    loads = {*works["operation"][is_load]} - {*works["operation"][~is_load]}
    works = works[~is_load | (works["operation"] >= 0)]
    operations["seconds"] = works.groupby("operation")["dur"].sum().reindex(operations.index, fill_value=0.0) / 1e6
    operations["step"] = numpy.searchsorted(starts, operations["ts"], "right")
    seconds = numpy.zeros(len(names))
    left_out: list[int] = []  # rows
    for (step, name), calls in operations.groupby(["step", "name"]):
        places = [place for place, each in enumerate(names) if each == name]
        of_batch = calls.index[calls.index.isin(loads)][: max(0, len(calls) - len(places))]
        left_out, calls = [*left_out, *of_batch], calls.drop(of_batch)
        times = calls["seconds"] if len(calls) == len(places) else calls["seconds"].sum() / len(places)
        seconds[places] += times / len(starts) if step else 0.0  # 0: before the first step
    total = works["dur"][~works["operation"].isin(left_out)].sum() / 1e6 / len(starts)
    return seconds.tolist(), max(0.0, float(total - seconds.sum()))


def busy_us(events: Sequence[Event]) -> float | None:
    """The µs in which a kernel ran; None for a trace without kernels. A copy is no kernel."""
    kernels = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") == "kernel")
    if not kernels:
        return None
    busy, until = 0.0, kernels[0][0]
    for start, end in kernels:
        busy, until = busy + max(0.0, end - max(start, until)), max(end, until)
    return busy


def _frames(events: Sequence[Event], names: Sequence[str]) -> tuple[Any, Any]:
    """The operations of these names that lie in no other one of their thread, by start, and the device's kernels and copies.

    Both are pandas' frames with `cat`, `name`, `tid`, `ts`, `dur` and `end`. The column `operation` of the second is the
    row of the operation in which the host launched the work; -1 for none.
    """
    import pandas as pd  # takes a third of a second, for a trace of a GPU alone

    keys = ("cat", "name", "tid", "ts", "dur")
    kept = [each for each in events if each.get("cat") in ("cpu_op", *_CALLS, *_WORKS)]
    every = pd.DataFrame({key: [each.get(key) for each in kept] for key in keys})
    every = every.astype({"cat": str, "name": str, "tid": str, "ts": float, "dur": float})
    every["end"] = every["ts"] + every["dur"]
    every["launch"] = [each.get("args", {}).get("correlation", -1) for each in kept]
    operations = every[every["cat"] == "cpu_op"].sort_values(["ts", "end"], ascending=[True, False])
    operations["name"] = operations["name"].str.replace("::", ".", n=1, regex=False)
    operations = operations[operations["name"].isin(names)]
    ended = operations.groupby("tid")["end"].cummax().groupby(operations["tid"]).shift(fill_value=-numpy.inf)
    operations = operations[operations["ts"] >= ended].reset_index(drop=True)
    launches = every[every["cat"].isin(_CALLS) & (every["launch"] >= 0)]
    launches = launches.drop_duplicates("launch").set_index("launch")[["ts", "tid"]]
    works = every[every["cat"].isin(_WORKS)].join(launches.add_prefix("host_"), on="launch").reset_index(drop=True)
    launched = works.dropna(subset="host_ts").sort_values("host_ts").reset_index()
    columns = operations[["ts", "tid", "end"]].add_prefix("host_").assign(operation=operations.index)
    found = pd.merge_asof(launched[["index", "host_ts", "host_tid"]], columns, on="host_ts", by="host_tid")
    within = found[found["host_end"] >= found["host_ts"]].set_index("index")["operation"]
    return operations, works.assign(operation=within.reindex(works.index, fill_value=-1).astype(int))
