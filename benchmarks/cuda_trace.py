"""Whether a training step makes the host wait for the GPU: a profiler trace, searched for calls that wait.

    python benchmarks/cuda_trace.py              # on a machine with a CUDA device

Trains the SimpleCNN with the default callbacks and loggers, traces 200 steps after the warm-up, and lists the calls that
wait for the device: synchronisations, allocations and releases of device or pinned memory (they synchronise, and a step
after the warm-up needs none), and copies from or to pageable memory. `--file trace.json` reads a trace made earlier. The
exit code is 1 if there is such a call, and 2 without a GPU or for an inconclusive trace: one with too few steps, or with
a step in which no CUDA call was recorded.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 200
WARM_UP = 130  # by then the first 100 steps have been read and written

SYNCHRONISING = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
    *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"),
    *("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol"),  # the ones that are not Async
    *("cuMemcpyHtoD", "cuMemcpyDtoH"),
)
ALLOCATING = (
    *("cudaMalloc", "cudaMallocManaged", "cudaFree", "cuMemAlloc", "cuMemFree"),
    *("cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease"),  # torch's expandable segments
    *("cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister", "cudaHostUnregister"),
    *("cuMemHostAlloc", "cuMemAllocHost", "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister"),
)
WAITING = frozenset(SYNCHRONISING + ALLOCATING)

Event = dict[str, Any]  # of a Chrome trace, as torch's profiler writes it


class CannotTell(Exception):
    """An inconclusive trace: it would show no call that waits even if there was one."""


def waits(events: Sequence[Event], steps: int = 1) -> list[str]:
    """What waits for the device in the traced steps, in order, each with its moment.

    Args:
        events: of the trace; times in µs.
        steps: how many steps the trace must hold at least.

    Raises:
        CannotTell: for fewer steps, or for one without a call of CUDA.
    """
    timed = [e for e in events if e.get("ph") == "X"]
    spans = _steps(timed)
    if len(spans) < steps:
        raise CannotTell(f"the trace holds {len(spans)} steps, and {steps} were asked for")
    calls = [e for e in timed if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    for name, first, last in spans:
        if not any(first <= float(call["ts"]) < last for call in calls):
            raise CannotTell(
                f"{name} holds no call of CUDA: the trace was made without a GPU, or without its activities"
            )
    begin, end = min(first for _, first, _ in spans), max(last for *_, last in spans)
    pageable = {_correlation(e) for e in timed if e.get("cat") == "gpu_memcpy" and "pageable" in e["name"].lower()}
    found = []
    for call in sorted(calls, key=lambda e: float(e["ts"])):
        why = " of pageable memory" if _correlation(call) in pageable - {None} else ""
        if begin <= float(call["ts"]) < end and (why or _plain(call["name"]) in WAITING):
            at, took = float(call["ts"]) - begin, float(call.get("dur", 0))
            found.append(f"{call['name']}{why} at {at:,.0f} µs for {took:,.0f} µs")
    return found


def _steps(timed: Sequence[Event]) -> list[tuple[str, float, float]]:
    """Name, beginning and end of every step, by the profiler's own marks on the host; the device's lie elsewhere."""
    marks = [e for e in timed if e.get("cat") == "user_annotation" and str(e["name"]).startswith("ProfilerStep#")]
    return [(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in marks]


def _correlation(event: Event) -> int | None:
    """What a call on the host and its work on the device have in common."""
    return event.get("args", {}).get("correlation")


def _plain(name: str) -> str:
    """A call's name without the version and the kind of stream that the driver's functions have at their end."""
    return re.sub(r"(_v\d+|_ptsz|_ptds)+$", "", name)


def trace(file: Path, steps: int, accelerator: str = "gpu", warm_up: int = WARM_UP, batch: int = 128) -> None:
    """Train, and write the trace of some steps after the warm-up."""
    import torch
    from lightning.pytorch.callbacks import Callback
    from monitoring import cnn, default_trainer

    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=warm_up, warmup=2, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
    )

    class Trace(Callback):
        def on_train_start(self, *_: Any) -> None:
            profiler.start()

        def on_train_batch_end(self, *_: Any) -> None:
            profiler.step()

        def on_train_end(self, *_: Any) -> None:
            profiler.stop()

    with tempfile.TemporaryDirectory() as folder:
        trainer = default_trainer(folder, accelerator, [Trace()])
        trainer.fit(*cnn(warm_up + steps + 10, device=trainer.strategy.root_device, batch=batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="how many are traced, or asked of a file")
    parser.add_argument("--file", type=Path, help="a Chrome trace to read instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = args.file or Path(folder) / "trace.json"
        if args.file is None:
            _require_cuda()
            trace(file, args.steps)
        events = json.loads(file.read_text())["traceEvents"]
    try:
        found = waits(events, args.steps)
    except CannotTell as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print("\n".join(found) or f"no call in {args.steps} steps waits for the device")
    sys.exit(1 if found else 0)


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to trace", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
