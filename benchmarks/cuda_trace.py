"""Whether a steady training step makes the host wait for the GPU: a profiler trace, searched for synchronisations.

    python benchmarks/cuda_trace.py --steps 20          # on a machine with a CUDA device

Trains the SimpleCNN with everything that train.py measures and logs, traces some steps after the warm-up, and lists
every call of the CUDA runtime in them that waits for the device. `--file trace.json` reads a trace made earlier. Exit
code 1 if there is such a call, 2 without a GPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WAITING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cudaMemcpy",  # the one that is not Async
)


def waits(events: Iterable[Mapping[str, Any]], first_us: float, last_us: float) -> list[str]:
    """The calls that wait for the device between two moments, each with its moment.

    Args:
        events: of a Chrome trace, as torch's profiler writes it.
        first_us, last_us: the moments on the trace's clock.
    """
    inside = (e for e in events if e.get("ph") == "X" and first_us <= float(e["ts"]) < last_us)
    found = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["name"] in WAITING]
    return [f"{e['name']} at {float(e['ts']) - first_us:,.0f} µs for {float(e.get('dur', 0)):,.0f} µs" for e in found]


def steady_steps(events: list[Mapping[str, Any]]) -> tuple[float, float]:
    """From the first traced step's beginning to the last one's end, by the profiler's own step marks."""
    marks = [e for e in events if str(e.get("name", "")).startswith("ProfilerStep#") and e.get("ph") == "X"]
    if not marks:
        sys.exit("the trace holds no ProfilerStep")
    return min(float(e["ts"]) for e in marks), max(float(e["ts"]) + float(e["dur"]) for e in marks)


def trace(file: Path, steps: int) -> None:
    """Train, and write the trace of some steps after the warm-up."""
    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback
    from monitoring import cnn, ours

    from batchscope.callbacks.curves import TrainCurves
    from batchscope.callbacks.progress import ProgressBar

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to trace", file=sys.stderr)
        sys.exit(2)
    after = 130  # the first bunch of steps has been read and written by then
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=after, warmup=2, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
    )

    class Trace(Callback):
        def on_train_start(self, *_: Any) -> None:
            profiler.start()

        def on_train_batch_end(self, *_: Any) -> None:
            profiler.step()

        def on_train_end(self, *_: Any) -> None:
            profiler.stop()

    module, loader = cnn(after + steps + 10)
    loader.device, loader.pinned = torch.device("cuda", 0), True
    callbacks = [*ours(), TrainCurves(), ProgressBar(), Trace()]
    with tempfile.TemporaryDirectory() as folder:
        loggers = [lightning.pytorch.loggers.TensorBoardLogger(folder), lightning.pytorch.loggers.CSVLogger(folder)]
        lightning.Trainer(
            accelerator="gpu", devices=1, max_epochs=1, logger=loggers, callbacks=callbacks,
            enable_model_summary=False, enable_checkpointing=False,
        ).fit(module, loader)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--file", type=Path, help="a Chrome trace to read instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = args.file or Path(folder) / "trace.json"
        if args.file is None:
            trace(file, args.steps)
        events = json.loads(file.read_text())["traceEvents"]
    found = waits(events, *steady_steps(events))
    print("\n".join(found) or "no call in these steps waits for the device")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
