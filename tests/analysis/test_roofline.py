"""The roofline plot: what is in it, where points without traffic stand, and that no text covers another."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from batchscope.analysis.roofline import roofline, roofline_png
from batchscope.records.explanation import Cost, Explanation, Roofs
from tests.support.explanations import cost, explanation

ROOFS = Roofs({"fp32": 100e9, "bf16": 20e9}, 20e9)


def product(module: str, flops: float, cold_bytes: float, seconds: float) -> Cost:
    return cost(module, flops=flops, bytes=max(cold_bytes, 1e6), cold_bytes=cold_bytes, seconds=seconds)


def step(*costs: Cost) -> Explanation:
    return replace(explanation(*costs), step_seconds=0.2, roofs=ROOFS)


def drawn(made: Explanation) -> Figure:
    figure = roofline(made)
    assert figure is not None
    return figure


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def points(figure: Figure) -> list[tuple[float, float]]:
    return [tuple(each.get_offsets()[0]) for each in figure.axes[0].collections]


TWO = (
    product("net.conv", 4e9, 1e8, 0.1),
    product("net.head", 1e8, 1e8, 0.05),
    cost("net.relu", cold_bytes=1e8, seconds=0.02),
)


def test_a_module_is_a_point_at_its_flop_a_byte_and_flop_a_second() -> None:
    figure = drawn(step(*TWO))
    assert points(figure) == [(40, pytest.approx(40e9)), (1, pytest.approx(2e9))]
    assert {"conv 50 %", "head 25 %", "the step", "main memory: 20 GB/s"} <= set(texts(figure))


def test_an_area_is_in_proportion_to_the_share_of_time() -> None:
    first, second = (each.get_sizes()[0] for each in drawn(step(*TWO)).axes[0].collections)
    assert first == pytest.approx(2 * second)


def test_every_measured_precision_is_a_roof_with_its_name() -> None:
    assert {"fp32\n100 GFLOP/s", "bf16\n20 GFLOP/s"} <= set(texts(drawn(step(*TWO))))
    close = replace(step(*TWO), roofs=Roofs({"fp32": 100e9, "bf16": 20e9, "fp16": 25e9}, 20e9))
    assert "fp16, bf16\n20 to 25 GFLOP/s" in texts(drawn(close))


def test_points_without_traffic_stand_in_a_strip_of_their_own() -> None:
    figure = drawn(step(*TWO, product("net.small", 1e6, 0, 1e-3)))
    assert "in cache" in texts(figure)
    x = max(x for x, _ in points(figure))
    (strip,) = [patch for patch in figure.axes[0].patches if patch.get_width() < math.inf]
    assert strip.get_x() < x < strip.get_x() + strip.get_width()
    assert "in cache" not in texts(drawn(step(*TWO)))


def test_the_bar_holds_the_whole_step() -> None:
    bars = drawn(step(*TWO)).axes[1].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(1)
    assert [round(bar.get_width(), 2) for bar in bars] == [0.5, 0.25, 0.1, 0.15]


def test_no_label_covers_another_one() -> None:
    crowd = [product(f"net.layer{n}", 1e9 * (1 + n / 50), 1e8, 0.02) for n in range(8)]
    figure = drawn(step(*crowd))
    renderer = figure.canvas.get_renderer()
    boxes = [Text.get_window_extent(text, renderer) for text in figure.axes[0].texts if text.get_rotation() == 0]
    assert len(boxes) >= 9  # without the lines that lead to the points
    for one, other in combinations(boxes, 2):
        assert not one.padded(-1).overlaps(other.padded(-1))


def test_many_modules_are_shown_as_what_contains_them() -> None:
    many = [product(f"net.block{n // 10}.{n % 10}", 1e8, 1e7, 0.001) for n in range(60)]
    assert len(points(drawn(step(*many)))) == 6


@pytest.mark.parametrize(
    "made",
    [
        explanation(*TWO),
        replace(step(*TWO), is_timed=False),
        step(cost("net.relu", cold_bytes=1e8, seconds=0.02)),
        step(),
    ],
    ids=["no roofs", "no times", "no FLOPs", "no operations"],
)
def test_without_roofs_times_or_flops_there_is_no_plot(made: Explanation) -> None:
    assert roofline_png(made) is None


def test_the_file_is_a_png() -> None:
    image = roofline_png(step(*TWO))
    assert image is not None
    assert image.startswith(b"\x89PNG")
