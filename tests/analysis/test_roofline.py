"""The roofline plot: what is in it, and where points without traffic stand."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from batchscope.analysis.roofline import roofline, roofline_png
from batchscope.records.explanation import Cost, Explanation, Roofs
from tests.support.explanations import cost, explanation

ROOFS = Roofs({"fp32": 100e9, "bf16": 20e9}, 20e9)


def product(module: str, flops: float, cold_bytes: float, seconds: float) -> Cost:
    return cost(module, flops=flops, bytes=max(cold_bytes, 1e6), cold_bytes=cold_bytes, seconds=seconds)


def step(*costs: Cost) -> Explanation:
    return replace(explanation(*costs), step_seconds=0.2, roofs=ROOFS)


def drawn(made: Explanation) -> tuple[Figure, list[str], list[tuple[float, float]]]:
    """The figure, its legend, and its points."""
    figure = roofline(made)
    assert figure is not None
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    return figure, names, [tuple(each.get_offsets()[0]) for each in figure.axes[0].collections]


TWO = (
    product("net.conv", 4e9, 1e8, 0.1),
    product("net.head", 1e8, 1e8, 0.05),
    cost("net.relu", cold_bytes=1e8, seconds=0.02),
)


def test_a_module_is_a_point_at_its_flop_a_byte_and_flop_a_second_with_its_share_as_area() -> None:
    figure, names, points = drawn(step(*TWO))
    assert points == [(40, pytest.approx(40e9)), (1, pytest.approx(2e9))]
    assert names == ["conv  50 %", "head  25 %", "the step", "main memory: 20 GB/s"]
    first, second = (each.get_sizes()[0] for each in figure.axes[0].collections)
    assert first == pytest.approx(2 * second)
    assert [text.get_text() for text in figure.axes[0].texts] == ["fp32: 100 GFLOP/s", "bf16: 20 GFLOP/s"]


def test_points_without_traffic_stand_right_of_all_others() -> None:
    _, names, points = drawn(step(*TWO, product("net.small", 1e6, 0, 1e-3)))
    assert "small  < 1 %, in cache" in names or "small  0 %, in cache" in names
    assert points[-1][0] > max(x for x, _ in points[:-1])


def test_many_modules_are_shown_as_what_contains_them() -> None:
    many = [product(f"net.block{n // 10}.{n % 10}", 1e8, 1e7, 0.001) for n in range(60)]
    assert len(drawn(step(*many))[2]) == 6


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
    assert image is not None and image.startswith(b"\x89PNG")
