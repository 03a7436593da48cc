"""The learning rate that follows the batch size: the rules, and what a record says of the rule that a run was trained by.

The record has the rate of the updates as `learning_rate`, under a schedule its peak or first value. Where a rule has scaled
`optimizer.lr` to it, `lr_scaling` has the `rule`, the `batch_size` (samples of an update over all devices) and the
`reference_batch_size`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from .metrics import metric
from .values import at, positive

Rule = Literal["none", "sqrt", "linear"]
_POWERS: dict[Any, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
_OF_SCHEDULE = {"one_cycle": "peak of one_cycle", "constant": "constant"}


def factor(rule: Rule, batch_size: float, reference: float) -> float:
    """By which a rate that was chosen for updates of `reference` samples is multiplied for those of `batch_size`."""
    return (batch_size / reference) ** _POWERS[rule]


def rule_words(record: Mapping[str, Any], batch: str = "") -> str:
    """What `optimizer.lr` of a run was multiplied by: `√(512 ÷ 128)`, `512 ÷ 128`; empty where no rule has scaled it.

    `batch` stands in place of the batch size.
    """
    rule, sizes = at(record, "lr_scaling.rule"), _sizes(record)
    if rule not in ("sqrt", "linear") or sizes is None:
        return ""
    words = f"{batch or format(round(sizes[0]), ',')} ÷ {round(sizes[1]):,}"
    return f"√({words})" if rule == "sqrt" else words


def rate_words(record: Mapping[str, Any]) -> str:
    """The rate of a run and where it comes from, `0.008: 0.004 × √(512 ÷ 128), peak of one_cycle`; empty where it is `optimizer.lr`."""
    rate, words, sizes = positive(record.get("learning_rate")), rule_words(record), _sizes(record)
    if rate is None or not words or sizes is None or sizes[0] == sizes[1]:
        return ""
    text, schedule = metric("learning_rate").text, str(at(record, "config.optimizer.schedule") or "constant")
    base = rate / factor(at(record, "lr_scaling.rule"), *sizes)
    return f"{text(rate)}: {text(base)} × {words}, {_OF_SCHEDULE.get(schedule, f'first of {schedule}')}"


def _sizes(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """The samples of an update, and those that the rate was chosen for; None if they are not known."""
    sizes = [positive(at(record, f"lr_scaling.{key}")) for key in ("batch_size", "reference_batch_size")]
    return (sizes[0], sizes[1]) if sizes[0] and sizes[1] else None
