"""The learning rate of a run in words: what it is, what it was scaled by, and from which rate."""

from typing import Any

import pytest

from batchscope.records.learning_rate import rate_words, rule_words


def record(rule: Any = "sqrt", size: Any = 512, reference: Any = 128, rate: Any = 0.008, **optimizer: Any) -> dict:
    """A record with what it says of the rate."""
    scaling = {"rule": rule, "batch_size": size, "reference_batch_size": reference}
    return {"learning_rate": rate, "lr_scaling": scaling, "config": {"optimizer": optimizer}}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (record(schedule="one_cycle"), "0.008: 0.004 × √(512 ÷ 128), peak of one_cycle"),
        (record("linear", 32, 128, 0.025, schedule="cosine"), "0.025: 0.1 × 32 ÷ 128, first of cosine"),
        (record(size=2048, rate=0.016, schedule="constant"), "0.016: 0.004 × √(2,048 ÷ 128), constant"),
        (record(), "0.008: 0.004 × √(512 ÷ 128), constant"),  # an optimizer of one's own names no schedule
        (record(size=128), ""),
        (record(rate=None), ""),
        ({"learning_rate": 0.004, "lr_scaling": None, "config": {"optimizer": {"lr_scaling": "auto"}}}, ""),
        ({"learning_rate": 0.004, "config": {"optimizer": {"lr": 0.004}}}, ""),  # before there were rules
        *(
            (record(**{name: wrong}), "")
            for name in ("rule", "size", "reference")
            for wrong in (None, [], "x", -1, 1e300)
        ),
    ],
)
def test_a_rate_that_was_scaled_is_named_with_what_it_was_scaled_from(facts: dict, words: str) -> None:
    assert rate_words(facts) == words


def test_a_rule_is_shown_for_a_size_or_for_all() -> None:
    assert rule_words(record()) == "√(512 ÷ 128)"
    assert rule_words(record("linear"), "size") == "size ÷ 128"
    assert rule_words({}) == ""
