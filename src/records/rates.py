"""The rate of a run: what `samples_per_sec` in the `throughput` of a record means.

A run has one rate: the samples of a whole batch on all devices over the median time of a step. Neither a few slow steps
nor the short last batch of an epoch changes it. Where batch sizes vary by design, so that no size has half of the samples, the
rate is samples over time of the steps that count in the median. Time steps/s, FLOP/s and MFU are derived from it.
`samples_per_sec_mean` is another number: all samples over the time of all steps. The parts of a step are means as well,
because only means add up; their sum is the mean step `step_ms`.
"""

from collections.abc import Mapping
from typing import Any

from .formatting import percent
from .values import at

RATE, MEAN_RATE = "samples_per_sec", "samples_per_sec_mean"
# From this share of the processor on, the load of other programs is reported beside a rate: an idle virtual machine
# loses 2 to 3 %, and a step on a CPU gets slower by at least the share of its cores that other programs take.
REPORTED_LOAD = 0.1
NEAR_BEST = 0.05  # a rate counts as the best if it is lower by at most this fraction


def load_words(share: float) -> str:
    """Describe the load beside a measurement: `other programs that took 65 % of the processor`."""
    return f"other programs that took {percent(share)} of the processor"


def why_no_rate(record: Mapping[str, Any]) -> str:
    """Return why a finished run has no rate: `of 2 updates none came after the warm-up of 5`."""
    reasons = (at(record, f"throughput.missing.{name}") for name in ("bottleneck", "samples_per_sec"))
    return str(next(filter(None, reasons), "nothing was measured"))


def rate(samples: float, step_ms: float) -> float:
    """Return samples/s from the samples of a step over all devices and the time of that step."""
    return 1e3 * samples / step_ms
