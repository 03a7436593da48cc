"""One registry says of every metric what it means, which direction is better, and how it is shown."""

import pytest

from batchscope.records.metrics import FRACTION, METRICS, RUN_METRICS, best_first, metric
from batchscope.records.step_parts import PARTS


def test_every_declared_metric_has_a_meaning_and_its_unit_ends_its_name() -> None:
    units = {"_ms": "ms", "_gib": "GiB", "_pct": "%", "_w": "W", "_per_sec": "/s"}
    for key, declared in {**METRICS, **RUN_METRICS}.items():
        assert declared.key == key
        assert declared.meaning
        for suffix, unit in units.items():
            assert not key.endswith(suffix) or declared.unit.endswith(unit), key


def test_every_part_of_a_step_is_a_metric() -> None:
    assert {f"time/{part}_ms" for part in PARTS} < METRICS.keys()
    assert {f"{part}_ms_mean" for part in PARTS} < RUN_METRICS.keys()


@pytest.mark.parametrize(
    ("key", "better", "text"),
    [
        ("val/acc", True, "98.5 %"),
        ("own/acc_top5", True, "98.5 %"),
        ("own/aux_loss", False, "0.985"),
        ("val/f1", None, "0.985"),
    ],
)
def test_the_name_tells_of_a_metric_that_is_not_declared(key: str, better: bool | None, text: str) -> None:
    found = metric(key)
    assert (found.higher_is_better, found.text(0.9851)) == (better, text)


def test_a_heading_with_a_percent_sign_saves_it_in_every_cell() -> None:
    assert metric("mfu").unit == FRACTION
    assert (metric("mfu").cell(0.123), metric("test/acc").cell(0.98)) == ("12.3", "98.0 %")


def test_an_accuracy_tells_most_and_a_metric_of_unknown_direction_least() -> None:
    assert best_first(["val/f1", "val/loss", "val/acc", "val/loss"]) == ["val/acc", "val/loss", "val/f1"]
