"""The rate of a run: what `samples_per_sec` in the `throughput` of a record means.

A run has one rate: the samples of a whole batch of all devices over the median time of a step. A few slow steps do not
change it; the short last batch of an epoch does not either. Where sizes vary by design, as no size
has half of the samples, it is samples over time of the steps that count in the median. Time steps/s, FLOP/s and MFU are derived from it.
`samples_per_sec_mean` is another number: all samples over the time of all steps. The parts of a step are means as well,
because only means add up, to the mean step `step_ms`.
"""

from collections.abc import Mapping
from typing import Any

from .formatting import percent
from .values import at

RATE, MEAN_RATE = "samples_per_sec", "samples_per_sec_mean"
# A rate is said with the load beside it where other programs took this share of the processor: an idle virtual machine
# loses 2 to 3 %, and a step on a CPU takes at least as much longer as others take of its cores.
LOAD_SAID = 0.1
NEAR_BEST = 0.05  # a rate that is lower than the best by this fraction at most counts as reaching it


def load_words(share: float) -> str:
    """What ran beside a measurement: `other programs that took 65 % of the processor`."""
    return f"other programs that took {percent(share)} of the processor"


def why_no_rate(record: Mapping[str, Any]) -> str:
    """Why a run that has finished has no rate: `of 2 updates none came after the warm-up of 5`."""
    reasons = (at(record, f"throughput.missing.{name}") for name in ("bottleneck", "samples_per_sec"))
    return str(next(filter(None, reasons), "nothing was measured"))


def rate(samples: float, step_ms: float) -> float:
    """Samples/s, from the samples of a step over all devices and the time of such a step."""
    return 1e3 * samples / step_ms
