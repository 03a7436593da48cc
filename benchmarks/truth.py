"""Check the measured numbers against an independent clock, for every model of the zoo and each data pipeline.

    python benchmarks/truth.py
    python benchmarks/truth.py --device cuda

The second epoch of a run is compared, which has no start-up: the samples/s from the sum of all parts of all steps, against the
wall clock between the epoch's first and last hook. The monitor's own time (`excluded_ms` of its summary) belongs to no step; it
is shown, and subtracted from the wall clock. The lower bound of a step is compared with the median step: no step may be faster.
The data are rendered digits or the adding problem. The exit code is 1 if samples/s differ by more than 0.5 %,
or a lower bound is above its step.
"""

import contextlib
import os
import sys
import tempfile
from typing import Any

from harness import arguments, bare_trainer, rows, task_of, write_result
from lightning.pytorch.callbacks import Callback

from batchscope import ThroughputMonitor
from batchscope.callbacks.step_file import StepFile
from batchscope.hardware.calibration import least_seconds
from batchscope.hardware.microbenchmarks import synchronized_time
from batchscope.options.compose import check_command_line
from batchscope.options.groups import choices_of
from batchscope.training.build import build
from batchscope.training.quiet import quiet_libraries

MOST = 0.005  # the largest difference of samples/s
# Samples for an epoch of some seconds on a CPU, and of a second on a GPU.
SIZES = {"cnn": 12_800, "mlp": 51_200, "torchvision": 2_560, "rnn_cell": 19_200, "lstm_cell": 12_800}


class OutsideClock(Callback):
    """The wall time of the last epoch."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.started = synchronized_time()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seconds = synchronized_time() - self.started  # waits for the GPU, which runs behind the host


def measure(
    model: str, pipeline: str, folder: str, accelerator: str = "cpu", samples: int = 640, calibrate: bool = False
) -> dict[str, float]:
    """The measured numbers of an epoch ÷ those of the clock; `bound_ratio` only with a calibration."""
    images = model in ("cnn", "mlp", "torchvision")
    data = ["data=digits", f"data.root={folder}"] if images else ["data=adding", "data.sequence_length=50"]
    line = [f"model={model}", *data, f"data.num_train={samples}", "data.num_val=1", f"data.pipeline={pipeline}"]
    config = check_command_line([*line, "optimizer.schedule=constant"], multirun=False)[0]
    source, steps = build(config["data"], "data"), -(-samples // config["data"]["batch_size"])
    clock, monitor = OutsideClock(), ThroughputMonitor(warmup_steps=steps, calibrate=calibrate, verbose=False)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), tempfile.TemporaryDirectory() as logs:
        options = {"max_epochs": 2, "logger": StepFile(logs), "log_every_n_steps": 1, "limit_val_batches": 0}
        trainer = bare_trainer(accelerator, [clock, monitor], **options)
        trainer.fit(task_of(config, source.spec), datamodule=source)
    summary = monitor.summary
    assert summary["updates"] == steps, summary
    writing = summary.get("excluded_ms", 0.0) / 1e3 * steps
    result = {
        "steps": steps,
        "wall_s": clock.seconds,
        "writing_share": writing / clock.seconds,
        "samples_per_sec": summary["samples_per_sec_mean"],
        "samples_per_sec_ratio": summary["samples_per_sec_mean"] * (clock.seconds - writing) / samples,
    }
    if monitor.calibration is None or monitor.measured is None or not monitor.measured.operations:
        return result
    bound_ms = 1e3 * sum(least_seconds(row, monitor.calibration) for row in monitor.measured.operations)
    return result | {"bound_ratio": bound_ms / summary["step_ms_median"]}


def main() -> None:
    args = arguments(__doc__, device=True).parse_args()
    quiet_libraries()
    results, lines = {}, []
    models, pipelines = choices_of("model"), ("memory", "device", "workers")
    cases = [("cnn", "memory")] if args.smallest else [(model, pipeline) for model in models for pipeline in pipelines]
    with tempfile.TemporaryDirectory() as folder:
        for model, pipeline in cases:
            samples = 640 if args.smallest else SIZES.get(model, 6_400)
            r = measure(model, pipeline, folder, args.device, samples, not args.smallest)
            results[f"{model} {pipeline}"] = r
            ratios = [f"{r['samples_per_sec_ratio']:.4f}", f"{r['writing_share']:.2%}"]
            bound = f"{r['bound_ratio']:.2f}" if "bound_ratio" in r else "–"
            lines.append([model, pipeline, r["steps"], f"{r['samples_per_sec']:,.0f}", *ratios, bound])
            print(*lines[-1], flush=True)
    worst = max(abs(r["samples_per_sec_ratio"] - 1) for r in results.values())
    above = [name for name, r in results.items() if r.get("bound_ratio", 0) > 1]
    head = ["model", "pipeline", "steps", "samples/s", "÷ outside clock", "writing", "lower bound ÷ step"]
    text = f"{rows(head, lines, words=2)}\n\nWorst deviation of samples/s: {worst:.2%}."
    text += f" A lower bound above the step: {', '.join(above) or 'none'}."
    write_result("truth", text, {"results": results}, args)
    sys.exit(not args.smallest and (worst > MOST or bool(above)))


if __name__ == "__main__":
    main()
