"""The plots: what is drawn of rates, of utilisation and of runs."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchscope.analysis import plots
from batchscope.analysis.answer import answer
from batchscope.analysis.groups import SweepResults
from batchscope.analysis.read import find
from tests.support.synthetic_runs import write_measured

RATES = {8: 1000, 64: 3000, 512: 4000}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    found: list[Figure] = []
    monkeypatch.setattr(plots, "_saved", lambda figure, _: found.append(figure) or plots.Picture(b"", ""))
    return found


def drawn(folder: Path, **facts: Any) -> tuple[SweepResults, list[str]]:
    """The names of the plots of a sweep with the rates above."""
    write_measured(folder, {size: 1e3 * size / rate for size, rate in RATES.items()}, **facts)
    sweep = find([folder])
    answers = [found for group in sweep.groups if (found := answer(group))]
    return sweep, list(plots.draw(sweep, answers, ["test/acc"]))


def points(axes: Axes) -> list[Any]:
    """The markers of single sizes, without the ring."""
    return [line for line in axes.lines if len(line.get_xdata()) == 1 and line.get_markerfacecolor() != "none"]


def test_the_interval_of_a_rate_is_drawn_whole(tmp_path: Path, figures: list[Figure]):
    sweep, _ = drawn(tmp_path, passes=False, noise=0.2, windows=8)
    rates = sweep.groups[0].rates
    axes = figures[0].axes[0]
    low, high = axes.get_ylim()
    for bar, size in zip(axes.collections, RATES, strict=True):
        ends = bar.get_segments()[0][:, 1]
        assert list(ends) == pytest.approx(
            [rates.rate(size) / (1 + rates.reach(size)), rates.rate(size) * (1 + rates.reach(size))]
        )
        assert low < ends[0] < ends[1] < high


def test_the_recommended_size_has_a_ring_and_a_size_that_is_hardly_known_is_hollow(
    tmp_path: Path, figures: list[Figure]
):
    drawn(tmp_path)
    (ring,) = [line for line in figures[0].axes[0].lines if line.get_markerfacecolor() == "none"]
    assert ring.get_xdata() == [512]
    assert "white" not in [line.get_markerfacecolor() for line in points(figures[0].axes[0])]


def test_an_undecided_answer_has_no_ring(tmp_path: Path, figures: list[Figure], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RATES, 64, 3800)
    drawn(tmp_path, passes=False, noise=0.2, windows=8)
    axes = figures[0].axes[0]
    assert not [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert "white" in [line.get_markerfacecolor() for line in points(axes)]


def test_useful_and_busy_are_in_one_picture(tmp_path: Path, figures: list[Figure]):
    _, names = drawn(tmp_path, throughput={"mfu": 0.12, "processor_time_pct": 98.0})
    axes = figures[names.index("utilisation")].axes[0]
    assert {round(float(line.get_ydata()[0])) for line in points(axes)} == {12, 98}
    assert axes.get_ylim() == (0, 105)


def test_what_is_drawn_of_a_run_has_its_id(tmp_path: Path, figures: list[Figure]):
    _, names = drawn(tmp_path, throughput={"memory_peak_gib": 1.0}, metrics={"test/acc": 0.9})
    assert set(names) == {"throughput", "step_time", "memory", "accuracy"}
    for figure in figures:
        artists = [*figure.axes[0].lines, *figure.axes[0].patches]
        assert {"run-0", "run-1", "run-2"} <= {artist.get_gid() for artist in artists}


def test_of_one_size_there_is_no_plot_against_the_size(tmp_path: Path, figures: list[Figure]):
    write_measured(tmp_path, {64: 10.0})
    assert plots.draw(find([tmp_path]), [], []) == {}
