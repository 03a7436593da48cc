"""Whether a training step makes the host wait for the GPU: a profiler trace, searched for calls that wait.

    python benchmarks/cuda_trace.py --device cuda

Trains SimpleCNN with the default callbacks and loggers, traces 200 steps after the warm-up, and lists the calls that wait
for the device: synchronisations, allocations and releases of device or pinned memory (a step after the warm-up needs
none), and copies from or to pageable memory. The exit code is 1 if a call waits, and 2 for an inconclusive trace: one with
too few steps, or with a step without a CUDA call, as on a machine without a GPU.
"""

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import arguments, write_result
from lightning.pytorch.callbacks import Callback
from monitoring import cnn, default_trainer

WARM_UP = 130  # steps: by then the first 100 have been read and written
# Synchronisations, copies that are not Async, allocations and releases; the last two are torch's expandable segments. The
# driver's functions have a version and a kind of stream at the end of their names.
WAITING = re.compile(
    r"(cuda(Device|Stream|Event)|cu(Ctx|Stream|Event))Synchronize|cudaMemcpy(2D|ToSymbol|FromSymbol)?|cuMemcpy(HtoD|DtoH)"
    r"|cuda(Malloc|MallocManaged|Free|HostAlloc|MallocHost|FreeHost|HostRegister|HostUnregister)"
    r"|cuMem(Alloc|Free|HostAlloc|AllocHost|FreeHost|HostRegister|HostUnregister|Create|Map|Unmap|Release)"
)
ENDING = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
Event = dict[str, Any]  # of a Chrome trace, as torch's profiler writes it


class CannotTell(Exception):
    """An inconclusive trace, which would show no waiting call even if there was one."""


def waits(events: Sequence[Event], steps: int) -> list[str]:
    """The calls that wait for the device in the traced steps, in order, each with its time and duration.

    Args:
        events: of the trace; times in µs.
        steps: how many steps the trace must hold at least.

    Raises:
        CannotTell: for fewer steps, or for a step without a CUDA call.
    """
    timed = [e for e in events if e.get("ph") == "X"]
    # The profiler's marks on the host; those of the device span other times.
    marks = [e for e in timed if e.get("cat") == "user_annotation" and str(e["name"]).startswith("ProfilerStep#")]
    spans = [(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in marks]
    calls = sorted((e for e in timed if e.get("cat") in ("cuda_runtime", "cuda_driver")), key=lambda e: float(e["ts"]))
    if len(spans) < steps:
        raise CannotTell(f"the trace holds {len(spans)} steps, and {steps} were asked for")
    for name, first, last in spans:
        if not any(first <= float(call["ts"]) < last for call in calls):
            raise CannotTell(f"{name} holds no call of CUDA: traced without a GPU, or without its activities")
    begin, end = min(first for _, first, _ in spans), max(last for *_, last in spans)
    pageable = {_correlation(e) for e in timed if e.get("cat") == "gpu_memcpy" and "pageable" in e["name"].lower()}
    lines = []
    for call in calls:
        why = " of pageable memory" if _correlation(call) in pageable - {None} else ""
        waits_itself = WAITING.fullmatch(ENDING.sub("", call["name"]))
        if begin <= float(call["ts"]) < end and (why or waits_itself):
            offset, duration = float(call["ts"]) - begin, float(call.get("dur", 0))
            lines.append(f"{call['name']}{why} at {offset:,.0f} µs for {duration:,.0f} µs")
    return lines


def _correlation(event: Event) -> int | None:
    """The number that a call on the host shares with its work on the device."""
    return event.get("args", {}).get("correlation")


def trace(file: Path, steps: int, accelerator: str, warm_up: int, batch: int) -> None:
    """Train, and write the trace of `steps` steps after the warm-up."""
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
    args = arguments(__doc__, device=True).parse_args()
    steps, warm_up, batch = (3, 8, 8) if args.smallest else (200, WARM_UP, 128)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace(file, steps, args.device, warm_up, batch)
        events = json.loads(file.read_text())["traceEvents"]
    try:
        calls = waits(events, steps)
    except CannotTell as error:
        print(error, file=sys.stderr)
        sys.exit(0 if args.smallest else 2)
    text = "\n".join(f"- {call}" for call in calls) or f"No call in {steps} steps waits for the device."
    write_result("cuda_trace", text, {"calls": calls}, args)
    sys.exit(1 if calls else 0)


if __name__ == "__main__":
    main()
