"""The metrics: name, unit, meaning, direction and format, declared once for logging, tables, plots and docs.

`METRICS` are logged during a run. A key is `<group>/<name>` in lower case, with its unit as suffix. `RUN_METRICS` are
the numbers of a whole run, by their names in `sweep.csv` and in the order of its columns. A metric that is declared in
neither, such as one of a user's callback, is described by its name (see `metric`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from .formatting import percent, significant
from .step_parts import PARTS

FRACTION = "fraction"  # the unit of a share: between 0 and 1, shown as a percentage


@dataclass(frozen=True)
class Metric:
    """What is measured: its key as it is logged, and its meaning in one line."""

    key: str
    unit: str = ""  # empty for a plain number
    meaning: str = ""
    higher_is_better: bool | None = None  # None where neither direction is better by itself
    text: Callable[[float], str] = significant  # shows a value
    heading: str = ""  # of its column in a table, with the unit of the column; the key by default
    detail: bool = False  # whether TensorBoard gets it only on request; it is in the CSV file anyway

    def cell(self, value: float) -> str:
        """The value in a table, where the heading already has the percent sign."""
        return self.text(value).removesuffix(" %") if self.heading.endswith("%") else self.text(value)


_percent_1 = partial(percent, digits=1)
_whole, _learning_rate = "{:,.0f}".format, "{:.3g}".format


def _millijoules(value: float) -> str:
    return significant(1e3 * value)


_ACCURACY, _LOSS = "fraction of correct answers", "the task's loss"
_RAN = "share of the time in which a kernel ran, however small"
_PROCESSOR = "processor time of the process and its children, of that of the usable cores"
_THROTTLED = "share of the time in which the clocks were lowered"
_RESERVED = "most memory that torch's allocator held on the device, in use or not"

METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("train/loss", "", f"{_LOSS} on the batch of this step, the mean of all processes", False),
        Metric("train/acc", FRACTION, f"{_ACCURACY} on the batch of this step", True, _percent_1),
        Metric(
            "train/noise_scale",
            "samples",
            "the batch size at which half of the samples' progress is lost to noise",
            None,
        ),
        Metric("val/loss", "", f"{_LOSS} on the validation set", False),
        Metric("val/acc", FRACTION, f"{_ACCURACY} on the validation set", True, _percent_1),
        Metric("test/loss", "", f"{_LOSS} on the test set", False),
        Metric("test/acc", FRACTION, f"{_ACCURACY} on the test set", True, _percent_1),
        Metric("throughput/samples_per_sec", "samples/s", "samples of all processes over the time of the step", True),
        Metric(
            "throughput/batches_per_sec",
            "batches/s",
            "batches of one process over the time of the step",
            True,
            detail=True,
        ),
        Metric(
            "throughput/timesteps_per_sec",
            "time steps/s",
            "for sequences: samples × time steps of a sample",
            True,
            detail=True,
        ),
        Metric(
            "throughput/flops_per_sec", "FLOP/s", "counted forward and backward FLOPs of one process", True, detail=True
        ),
        Metric("throughput/mfu", FRACTION, "of the peak measured on this device at this precision", True, _percent_1),
        Metric("time/step_ms", "ms", "wall time of a step, from its batch being requested to the next request", False),
        *(
            Metric(f"time/{part}_ms", "ms", f"{part.replace('_', ' ')}: a part of the step", False, detail=True)
            for part in PARTS
        ),
        Metric("device/utilization_pct", "%", f"GPU: {_RAN}", None, _whole),
        Metric("device/processor_time_pct", "%", f"CPU: {_PROCESSOR}", None, _whole),
        Metric("device/sm_clock_mhz", "MHz", "clock of the multiprocessors", True, _whole, detail=True),
        Metric("device/throttled_pct", "%", f"{_THROTTLED} (NVIDIA)", False, _whole),
        Metric(
            "device/memory_peak_gib", "GiB", "highest allocated memory since training began, with validation", False
        ),
        Metric("device/memory_reserved_gib", "GiB", f"CUDA: {_RESERVED}", False, detail=True),
        Metric(
            "device/memory_allocated_gib",
            "GiB",
            "tensors in torch's allocator; CPU: the process without libraries",
            False,
            detail=True,
        ),
        Metric("device/power_w", "W", "of the whole device"),
        Metric("host/cpu_pct", "%", "CPU time of the process; 100 is one busy core", None, _whole, detail=True),
        Metric("host/rss_gib", "GiB", "memory of the process that is in RAM", False, detail=True),
    )
}

RUN_METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("batch_size", "samples", "of a whole batch of one device", None, _whole, "batch size"),
        Metric("processes", "", "that train together, one device each", None, _whole),
        Metric("global_batch_size", "samples", "of an update over all devices", None, _whole, "global"),
        Metric("samples_per_sec", "samples/s", "a whole batch over the typical step", True, heading="samples/s"),
        Metric("samples_per_sec_low", "samples/s", "the lower end of the rate's 90 % interval", True),
        Metric("samples_per_sec_high", "samples/s", "the upper end of the rate's 90 % interval", True),
        Metric("samples_per_sec_mean", "samples/s", "all samples over the time of all steps", True),
        Metric("samples_per_sec_fit", "samples/s", "all samples over the wall time of the fit", True),
        Metric(
            "step_ms_typical", "ms", "the geometric mean of the median steps of the windows", False, heading="step ms"
        ),
        *(Metric(f"{part}_ms_mean", "ms", "a part of the mean step", False) for part in PARTS),
        Metric("scaling_efficiency", FRACTION, "of n single devices", True, percent, "scaling efficiency %"),
        Metric("communication_share", FRACTION, "of the mean step, waiting for gradients", False, percent, "comm %"),
        Metric("utilization_pct", "%", f"GPU: {_RAN}", None, _whole, "kernel ran %"),
        Metric("processor_time_pct", "%", f"CPU: {_PROCESSOR}", None, _whole, "processor time %"),
        Metric("mfu", FRACTION, "of the peak measured on this device", True, _percent_1, "MFU %"),
        Metric("memory_peak_gib", "GiB", "of the device; on a CPU of the process", False, heading="peak GiB"),
        Metric("joules_per_sample", "J", "energy of the device", False, _millijoules, "mJ/sample"),
        Metric("compile_seconds", "s", "of torch.compile, in no rate", False, heading="compile s"),
        Metric("time_to_target_s", "s", "of training, until the target was reached", False, heading="s to target"),
        Metric("samples_to_target", "samples", "trained on until then", False, heading="samples to target"),
        Metric(
            "noise_scale", "samples", "the gradient noise scale at the end of training", None, heading="noise scale"
        ),
        Metric("learning_rate", "", "as scaled to the batch size", None, _learning_rate, "scaled lr"),
        Metric(
            "seconds",
            "s",
            "from the start of the run to its end, without waiting for other runs",
            None,
            _whole,
            "seconds",
        ),
    )
}


def staged(key: str) -> str:
    """The name of a metric by its stage: a LightningModule of one's own may call `test/acc` `test_acc`."""
    stage, _, name = key.partition("_")
    return f"{stage}/{name}" if stage in ("train", "val", "test") and name else key


def metric(key: str) -> Metric:
    """The declaration of a metric. An undeclared one is described by its name: `…acc` is a fraction that rises, `…loss` falls."""
    declared = METRICS.get(key) or RUN_METRICS.get(key)
    if declared:
        return declared
    name = key.rpartition("/")[2]
    if name.startswith("acc"):
        return Metric(key, FRACTION, _ACCURACY, True, _percent_1)
    return Metric(key, higher_is_better=False if "loss" in name else None)


def best_first(keys: Iterable[str]) -> list[str]:
    """Metrics of quality, the most telling first: accuracies, losses, then those of unknown direction."""
    order = {True: 0, False: 1, None: 2}
    return sorted(dict.fromkeys(keys), key=lambda key: order[metric(key).higher_is_better])
