"""What limits a run: the rule, on steps as they are measured."""

import math
import re
from typing import get_args

import pytest

from batchscope.hardware.bottleneck import COMPUTE_MFU, Kind, find_bottleneck

CPU_PEAK, GPU_PEAK = 150e9, 50e12


def at(fraction: float, device: str = "cpu") -> dict:
    """An achieved FLOP/s over the whole step, and its peak."""
    peak = CPU_PEAK if device == "cpu" else GPU_PEAK
    return {"flops_per_sec": fraction * peak, "peak_flops_per_sec": peak}


CASES = {
    # --- a CPU: one part follows the other ---
    "cnn, batch 128": (
        {"data_wait": 0.2, "transfer": 0.01, "forward": 12, "backward": 25, "optimizer": 2, "other": 1},
        {"device": "cpu", **at(0.4)},
        ("compute", 37 / 40.21),
    ),
    "mlp, batch 8: near the floor": (
        {"data_wait": 0.05, "forward": 0.1, "backward": 0.2, "optimizer": 0.3, "other": 0.6},
        {"device": "cpu", **at(0.01)},
        ("host", 1.2 / 1.25),
    ),
    "a long step far below the peak": (
        {"data_wait": 0.5, "forward": 20, "backward": 30, "optimizer": 1, "other": 1.5},
        {"device": "cpu", **at(0.02)},
        None,
    ),
    "compute, but the optimizer takes longest": (
        {"forward": 10, "backward": 10, "optimizer": 30},
        {"device": "cpu", **at(0.2)},
        ("memory", 0.6),
    ),
    "middling, by elimination": (
        {"forward": 10, "backward": 20, "optimizer": 5, "other": 1},
        {"device": "cpu", **at(0.2)},
        ("memory", 35 / 36),
    ),
    "a per-sample loader in the training process": (
        {"data_wait": 30, "forward": 5, "backward": 10, "optimizer": 1, "other": 1},
        {"device": "cpu", **at(0.15)},
        ("input", 30 / 47),
    ),
    "the same at an unknown MFU": (
        {"data_wait": 30, "forward": 5, "backward": 10, "optimizer": 1, "other": 1},
        {"device": "cpu"},
        ("input", 30 / 47),
    ),
    "data 40 %, work 60 % at an unknown MFU": (
        {"data_wait": 40, "forward": 20, "backward": 40},
        {"device": "cpu"},
        None,
    ),
    "callbacks that take longer than the model": (
        {"forward": 1, "backward": 1, "optimizer": 1, "other": 9},
        {"device": "cpu"},
        ("host", 0.75),
    ),
    "a busy share means nothing on a CPU": ({"forward": 1, "backward": 1}, {"device": "cpu", "busy": 1.0}, None),
    # --- CUDA: parts are times in the stream ---
    "a GPU at 12 %, small batch": (
        {"data_wait": 0.1, "transfer": 0.1, "forward": 1, "backward": 1.5, "optimizer": 0.8, "other": 0.5},
        {"device": "cuda", "busy": 0.12, **at(0.004, "cuda")},
        ("host", 0.95),
    ),
    "a GPU at 12 %, waiting for workers": (
        {"data_wait": 15, "transfer": 0.5, "forward": 1, "backward": 1.5, "optimizer": 1, "other": 1},
        {"device": "cuda", "busy": 0.12, **at(0.04, "cuda")},
        ("input", 0.75),
    ),
    "a GPU waiting for unpinned copies": (
        {"data_wait": 1, "transfer": 6, "forward": 1, "backward": 1, "optimizer": 0.5, "other": 0.5},
        {"device": "cuda", "busy": 0.3, **at(0.1, "cuda")},
        ("transfer", 0.6),
    ),
    "the host waits for data, the device does not": (
        {"data_wait": 12, "transfer": 1, "forward": 2, "backward": 3, "optimizer": 1, "other": 1},
        {"device": "cuda", "busy": 0.97, **at(0.45, "cuda")},
        ("compute", 0.97),
    ),
    "busy with what is unknown": (
        {"data_wait": 1, "forward": 30, "backward": 60, "optimizer": 9},
        {"device": "cuda", "busy": 0.98},
        None,
    ),
    "mostly idle, MFU unknown": (
        {"data_wait": 0.1, "forward": 1, "backward": 1.5, "optimizer": 1, "other": 0.4},
        {"device": "cuda", "busy": 0.2},
        ("host", 0.775),
    ),
    "CUDA of an unknown busy share, well filled": (
        {"data_wait": 1, "transfer": 1, "forward": 30, "backward": 60, "optimizer": 8},
        {"device": "cuda", **at(0.45, "cuda")},
        ("compute", 0.9),
    ),
    "CUDA of an unknown busy share, framework overhead": (
        {"data_wait": 0.2, "forward": 0.5, "backward": 0.7, "optimizer": 0.4, "other": 1.2},
        {"device": "cuda", **at(0.005, "cuda")},
        ("host", 2.8 / 3),
    ),
    "CUDA of which nothing is known, waiting for data": (
        {"data_wait": 30, "forward": 5, "backward": 10, "optimizer": 1, "other": 1},
        {"device": "cuda"},
        ("input", 30 / 47),
    ),
    "CUDA of which nothing is known, at work": (
        {"data_wait": 1, "forward": 5, "backward": 10, "optimizer": 1, "other": 1},
        {"device": "cuda"},
        None,
    ),
    # --- MPS: asynchronous, and no events ---
    "asynchronous, nothing known": ({"data_wait": 30, "forward": 5, "backward": 10}, {"device": "mps"}, None),
    "asynchronous, well filled whatever the host waits for": (
        {"data_wait": 30, "forward": 5, "backward": 10},
        {"device": "mps", **at(0.5)},
        ("compute", 1.0),
    ),
    "asynchronous, near the floor": (
        {"data_wait": 0.2, "forward": 1, "backward": 1.5, "optimizer": 0.8, "other": 0.5},
        {"device": "mps", **at(0.01)},
        ("host", 0.95),
    ),
    # --- nothing to divide ---
    "no time": ({}, {"device": "cpu", **at(0.5)}, None),
    "no number": ({"forward": math.nan, "other": 1}, {"device": "cpu", **at(0.5)}, None),
    "a clock that went backward": ({"forward": 10, "data_wait": -1}, {"device": "cpu", **at(0.5)}, None),
    "a peak of 0": ({"forward": 10, "backward": 20}, {"device": "cpu", **at(0.5) | {"peak_flops_per_sec": 0}}, None),
}


@pytest.mark.parametrize("parts, facts, expected", CASES.values(), ids=CASES.keys())
def test_the_bottleneck_is_where_the_rule_puts_it(parts, facts, expected):
    found = find_bottleneck(parts, batch_size=32, **facts)

    if expected is None:
        assert found is None
    else:
        assert (found.kind, found.share) == (expected[0], pytest.approx(expected[1]))


def test_every_kind_is_covered():
    assert {expected[0] for _, _, expected in CASES.values() if expected} == set(get_args(Kind))


def test_a_larger_share_of_the_peak_never_turns_from_compute():
    parts = {"data_wait": 0.1, "forward": 10, "backward": 20, "optimizer": 2, "other": 1}

    kinds = [find_bottleneck(parts, **at(fraction)).kind for fraction in (0.15, COMPUTE_MFU, 0.6, 1.1)]

    assert kinds == ["memory", "compute", "compute", "compute"]


@pytest.mark.parametrize(
    "case, words",
    [
        ("cnn, batch 128", ["92 % of a step", "43 % of the measured peak", "trainer.accelerator=gpu", "(now 32)"]),
        ("a GPU at 12 %, small batch", ["95 % of a step", "data.batch_size (now 32)", "trainer.accelerator=cpu"]),
        ("a GPU at 12 %, waiting for workers", ["data.pipeline=device or memory", "data.num_workers"]),
        ("a per-sample loader in the training process", ["data.pipeline=memory", "data.num_workers"]),
        ("a GPU waiting for unpinned copies", ["data.pipeline=device"]),
        ("middling, by elimination", ["trainer.accelerator=gpu", "a larger data.batch_size (now 32)", "measured peak"]),
    ],
)
def test_advice_is_one_sentence_that_names_options(case, words):
    parts, facts, _ = CASES[case]

    advice = find_bottleneck(parts, batch_size=32, **facts).advice

    assert all(word in advice for word in words), advice
    assert advice.endswith(".") and "\n" not in advice and ". " not in advice


@pytest.mark.parametrize("precision", [None, "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("fraction", [0.15, 0.6], ids=["memory", "compute"])
def test_advice_names_a_precision_only_where_one_is_faster(fraction, precision):
    parts = {"forward": 10, "backward": 20}
    advice = find_bottleneck(parts, device="cuda", **at(fraction, "cuda"), faster_precision=precision).advice
    assert re.findall(r"trainer\.precision=([\w-]+)", advice) == ([precision] if precision else [])


def test_without_a_faster_precision_only_more_gpus_compute_faster():
    advice = find_bottleneck({"forward": 10, "backward": 20}, device="cuda", **at(0.6, "cuda")).advice
    assert "measured peak: more trainer.devices is the way to go faster, a larger data.batch_size is not." in advice


def test_advice_without_a_batch_size():
    assert "now" not in find_bottleneck({"other": 9, "forward": 1}).advice
