"""The learning rate of a run in words: its value, and the factor of its scaling."""

from typing import Any

import pytest

from batchscope.records.learning_rate import rate_words


def record(rule: Any = "sqrt", size: Any = 512, reference: Any = 128, rate: Any = 0.008) -> dict:
    """A record with the fields of the learning rate."""
    scaling = {"rule": rule, "batch_size": size, "reference_batch_size": reference}
    return {"learning_rate": rate, "lr_scaling": scaling}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (record(), "0.008 (2 × optimizer.lr)"),
        (record("linear", 32, 128, 0.025), "0.025 (0.25 × optimizer.lr)"),
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
