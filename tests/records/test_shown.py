"""Numbers, metrics and lines as people see them."""

import io

import pytest

from batchscope.records.formatting import count, duration, memory, option_value, percent, significant, with_prefix
from batchscope.records.metrics import FRACTION, METRICS, RUN_METRICS, best_first, card, metric, staged
from batchscope.records.step_parts import PARTS
from batchscope.records.terminal import say, wrapped

SHOWN = {
    significant: {"61,200": 61234, "843": 843, "100": 99.96, "8.43": 8.434, "0.0123": 0.01234, "0.00": 0, "-5.00": -5},
    duration: {"3.2 ms": 0.0032, "45 s": 45.04, "2.5 min": 149, "2 min": 120, "12 min": 720, "1.5 h": 5400, "1.23 s": 1.234},
    with_prefix: {
        "10.3 TFLOP/s": (10.34e12, "FLOP/s"), "900 µJ": (0.0009, "J"), "422 ns": (4.22e-7, "s"), "1 kB": (999.96, "B"),
        "12": (12, ""), "0 J": (0, "J"),
    },
    memory: {"0.5 KiB": 512, "1 MiB": 2**20, "0.986 GiB": 1010 * 2**20, "999 MiB": 999 * 2**20, "2,020 GiB": 2016 * 2**30},
    percent: {"35 %": 0.353, "98.5 %": (0.9846, 1)},
    count: {"1 step": (1, "step"), "1,200 steps": (1200, "step")},
    option_value: {"true": True, "null": None, "0.004": 0.004, "cpu": "cpu", "[1,null]": [1, None]},
}  # fmt: skip


@pytest.mark.parametrize("shows", SHOWN, ids=lambda shows: shows.__name__)
def test_a_number_has_the_digits_and_the_unit_that_suit_it(shows):
    for text, value in SHOWN[shows].items():
        assert shows(*value if isinstance(value, tuple) else (value,)) == text


def test_every_declared_metric_has_a_meaning_and_its_unit_ends_its_name():
    units = {"_ms": "ms", "_gib": "GiB", "_pct": "%", "_w": "W", "_per_sec": "/s"}
    for key, declared in {**METRICS, **RUN_METRICS}.items():
        assert declared.key == key and declared.meaning
        for suffix, unit in units.items():
            assert not key.endswith(suffix) or declared.unit.endswith(unit), key
    assert {f"time/{part}_ms" for part in PARTS} < METRICS.keys()
    assert {f"{part}_ms_mean" for part in PARTS} < RUN_METRICS.keys()


def test_the_name_tells_of_a_metric_that_is_not_declared():
    for key in ("val/acc", "own/acc_top5", "own/top5_acc", "val/acc5", "val_accuracy"):
        assert (metric(key).higher_is_better, metric(key).text(0.9851)) == (True, "98.5 %")
    undirected = ("val/f1", "val/acceleration_mae", "val/accumulated_cost", "val/top5_accumulated")
    for key, better in (("own/aux_loss", False), *((key, None) for key in undirected)):
        assert (metric(key).higher_is_better, metric(key).text(0.9851)) == (better, "0.985")


def test_a_stage_has_one_name_whatever_a_module_calls_it():
    for key in ("val_top5_acc", "valid/top5_acc", "validation_top5_acc", "val/top5_acc"):
        assert staged(key) == "val/top5_acc"
    for key in ("validity", "valid_", "own/val_acc", "value_loss", "train"):
        assert staged(key) == key


def test_a_cell_has_no_space_and_an_accuracy_comes_first():
    assert metric("mfu").unit == FRACTION
    assert (metric("mfu").cell(0.123), metric("test/acc").cell(0.98)) == ("12%", "98.0%")
    assert best_first(["val/f1", "val/loss", "val/acc", "val/loss"]) == ["val/acc", "val/loss", "val/f1"]


def test_tensorboard_has_rates_losses_and_accuracies_first():
    for key in (
        "train/loss",
        "val/acc",
        "test/acc",
        "throughput/mfu",
        "sweep/samples_per_sec",
        "sweep/test/acc",
        "own",
    ):
        assert card(key) == key
    for key in ("epoch", "device/power_w", "time/step_ms", "throughput/flops_per_sec", "sweep/memory_peak_gib"):
        assert card(key) == f"· {key}" > "val/loss"


def test_a_line_breaks_at_a_space_keeps_its_margin_and_breaks_no_word():
    for line, width, lines in (
        ("  one two three", 11, ["  one two", "    three"]),
        ("see outputs/runs/2026/run.json", 20, ["see", "  outputs/runs/2026/run.json"]),
        ("", 20, [""]),
    ):
        assert wrapped([line], width) == lines


def test_a_character_without_a_code_is_a_question_mark_and_its_line_is_said(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", stream)
    say("± 3 %")
    assert stream.buffer.getvalue() == b"+- 3 %\n"
