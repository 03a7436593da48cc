"""The metrics: name, unit, meaning, direction and format, declared once for logging, tables, plots and docs.

`METRICS` are logged during a run. A key is `<group>/<name>` in lower case, with its unit as suffix. `RUN_METRICS` are
the numbers of a whole run, by their names in `sweep.csv` and in the order of its columns. An undeclared metric, such as
that of a user's callback, is described by its name (see `metric`).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from .formatting import percent, significant
from .step_parts import PARTS

FRACTION = "fraction"  # the unit of a share: between 0 and 1, shown as a percentage


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric: its key as it is logged, and its meaning in one line."""

    key: str
    unit: str = ""  # empty for a plain number
    meaning: str = ""
    higher_is_better: bool | None = None  # None if neither direction is better by itself
    text: Callable[[float], str] = significant  # formats a value
    heading: str = ""  # of a table's column, with the unit if cells have none; empty for the key

    def exact(self, value: float) -> str:
        """Format a value with more digits than `text`, to tell it from values near it: `99.95 %`."""
        if not self.text(value).endswith("%"):
            return f"{value:.5g}"
        return f"{100 * value if value <= 1 else value:.5g} %"

    def cell(self, value: float) -> str:
        """Format a value for a table, where space is scarce: `13%`."""
        return self.text(value).replace(" %", "%") + ("%" if self.unit == "%" else "")


def _format_accuracy(value: float) -> str:
    """Format an accuracy, which some modules log in percent."""
    return percent(value if value <= 1 else value / 100, digits=1)


_FORMATS: dict[str, Callable[[float], str]] = {
    "": significant,
    "share": lambda value: percent(value, digits=0 if value >= 0.0995 else 1),
    "percent.1": partial(percent, digits=1),
    "accuracy": _format_accuracy,
    "whole": "{:,.0f}".format,
    "rate": "{:.3g}".format,
    "milli": lambda value: significant(1e3 * value),
}
_FIRST_CARDS = ("throughput/samples_per_sec", "throughput/mfu", "sweep/samples_per_sec", "sweep/mfu")
_DETAIL_PREFIXES = ("device/", "host/", "time/", "summary/", "throughput/", "sweep/")
_ACCURACY = "fraction of correct answers"
_PARTS = "\n".join(f"time/{part}_ms | ms | down | | | a part of the step" for part in PARTS)
_MEAN_PARTS = "\n".join(f"{part}_ms_mean | ms | down | | | a part of the mean step" for part in PARTS)
_ACCURACY_NAME = re.compile(r"(^|_)acc(uracy)?(_|\d|$)")  # top5_acc, acc5, accuracy_val; not acceleration
_STAGE = re.compile(r"^(?:(train|test)|val(?:id(?:ation)?)?)[_/](?=.)")
_LOADER = re.compile(r"/dataloader_idx_\d+$")  # Lightning's suffix for a metric of several loaders


def _parse_table(lines: str) -> dict[str, Metric]:
    """Return the metrics of a table with the columns key, unit, better direction, format, heading, meaning."""
    metrics = {}
    for line in lines.strip().splitlines():
        key, unit, better, text, heading, meaning = (cell.strip() for cell in line.split("|"))
        direction = {"up": True, "down": False, "": None}[better]
        metrics[key] = Metric(key, unit, meaning, direction, _FORMATS[text], heading)
    return metrics


METRICS = _parse_table(f"""
train/loss | | down | | | the task's loss on the batch of this step, the mean of all processes; of accumulated batches the last one
train/acc | {FRACTION} | up | accuracy | | {_ACCURACY} on the batch of this step; of accumulated batches the last one
val/loss | | down | | | the task's loss on the validation set; of a run, in the last validation
val/acc | {FRACTION} | up | accuracy | | {_ACCURACY} on the validation set; of a run, in the last validation
test/loss | | down | | | the task's loss on the test set, by the best checkpoint
test/acc | {FRACTION} | up | accuracy | | {_ACCURACY} on the test set, by the best checkpoint
throughput/samples_per_sec | samples/s | up | | | samples of all processes over the time of the step
throughput/batches_per_sec | batches/s | up | | | batches of one process over the time of the step
throughput/timesteps_per_sec | time steps/s | up | | | for sequences: the time steps of all samples, without padding
throughput/flops_per_sec | FLOP/s | up | | | counted forward and backward FLOPs of one process
throughput/mfu | {FRACTION} | up | percent.1 | | of the peak measured on this device at this precision
time/step_ms | ms | down | | | wall time of a step, from its batch being requested to the next request
{_PARTS}
device/utilization_pct | % | | whole | | GPU: share of the time in which a kernel ran, however small
device/processor_time_pct | % | | whole | | CPU: processor time of the process and its children, of that of the usable cores
device/sm_clock_mhz | MHz | up | whole | | clock of the multiprocessors
device/throttled_pct | % | down | whole | | share of the time in which the clocks were lowered (NVIDIA)
device/memory_peak_gib | GiB | down | | | highest allocated memory since training began, with validation
device/memory_allocated_gib | GiB | down | | | tensors in torch's allocator; CPU: the process without libraries
device/power_w | W | | | | of the whole device
host/cpu_pct | % | | whole | | CPU time of the process; 100 is one busy core
host/rss_gib | GiB | down | | | memory of the process that is in RAM
""")

RUN_METRICS = _parse_table(f"""
batch_size | samples | | whole | batch size | of a whole batch of one device
processes | | | whole | | that train together, one device each
global_batch_size | samples | | whole | global | of an update over all devices
samples_per_sec | samples/s | up | | samples/s | a whole batch over the typical step
samples_per_sec_low | samples/s | up | | | the lower end of the rate's 90 % interval
samples_per_sec_high | samples/s | up | | | the upper end of the rate's 90 % interval
samples_per_sec_mean | samples/s | up | | | all samples over the time of all steps
step_ms_typical | ms | down | | step ms | the geometric mean of the mean steps of the windows
{_MEAN_PARTS}
utilization_pct | % | | whole | busy | GPU: share of the time in which a kernel ran, however small
processor_time_pct | % | | whole | processor time | CPU: processor time of the process and its children, of that of the usable cores
mfu | {FRACTION} | up | share | MFU | of the peak measured on this device
memory_peak_gib | GiB | down | | GiB | of the device; on a CPU of the process
joules_per_sample | J | down | milli | mJ/sample | energy of the device
time_to_target_s | s | down | | s to target | of training, until the target was reached
samples_to_target | samples | down | | samples | trained on until then
learning_rate | | | rate | scaled lr | as scaled to the batch size
seconds | s | | whole | seconds | from the start of the run to its end, without waiting for other runs; of a resumed run, of all its processes, and of one that was killed until its checkpoint
""")


def staged(key: str) -> str:
    """Return the name of a metric with its stage in front: `val/acc` for `val_acc` or `valid/acc` of a LightningModule."""
    return _STAGE.sub(lambda stage: f"{stage[1] or 'val'}/", key)


def metric(key: str) -> Metric:
    """Return the declaration of a metric, or one from its name: `top5_acc` is a fraction that rises, a loss falls."""
    declared = METRICS.get(key) or RUN_METRICS.get(key)
    if declared:
        return declared
    name = _LOADER.sub("", key).rpartition("/")[2]
    if _ACCURACY_NAME.search(name):
        return Metric(key, FRACTION, _ACCURACY, True, _format_accuracy)
    return Metric(key, higher_is_better=False if "loss" in name else None)


def card(key: str) -> str:
    """Return the name of a metric in TensorBoard, which sorts its cards by name.

    samples/s, MFU, losses and accuracies come first. A metric that is constant, follows from another one, or is only
    looked at for a reason gets a name that sorts behind all letters: `· device/power_w`.
    """
    is_first = key in _FIRST_CARDS or key.startswith(("sweep/test/", "sweep/val/"))
    return f"· {key}" if key == "epoch" or (key.startswith(_DETAIL_PREFIXES) and not is_first) else key


def best_first(keys: Iterable[str]) -> list[str]:
    """Sort metrics of quality: accuracies, then losses, then those of unknown direction."""
    order = {True: 0, False: 1, None: 2}
    return sorted(dict.fromkeys(keys), key=lambda key: order[metric(key).higher_is_better])
