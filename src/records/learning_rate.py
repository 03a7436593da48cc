"""Rules that scale the learning rate with the batch size, and what a record says about the rule of its run.

`learning_rate` in the record is the rate of the updates; with a schedule, its peak or first value. If a rule has scaled
`optimizer.lr`, `lr_scaling` has the `rule`, the `batch_size` (samples of an update over all devices) and the
`reference_batch_size`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from .metrics import metric
from .values import at, positive

Rule = Literal["none", "sqrt", "linear"]
_POWERS: dict[Any, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def factor(rule: Rule, batch_size: float, reference: float) -> float:
    """Return the factor that scales a learning rate from updates of `reference` samples to those of `batch_size`."""
    return (batch_size / reference) ** _POWERS[rule]


def rate_words(record: Mapping[str, Any]) -> str:
    """Return the scaled rate of a run, `0.008 (2 × optimizer.lr)`; empty where the rate is `optimizer.lr` itself."""
    rate, rule = positive(record.get("learning_rate")), at(record, "lr_scaling.rule")
    size, reference = (positive(at(record, f"lr_scaling.{key}")) for key in ("batch_size", "reference_batch_size"))
    if rate is None or rule not in ("sqrt", "linear") or not size or not reference or size == reference:
        return ""
    return f"{metric('learning_rate').text(rate)} ({factor(rule, size, reference):.3g} × optimizer.lr)"
