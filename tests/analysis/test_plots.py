"""The plots show the same numbers as the table, and cope with many groups and odd sizes."""

import pytest

from batchscope.analysis import write_report
from batchscope.analysis.plots import device, step_time, throughput
from batchscope.analysis.read import find
from batchscope.analysis.recommend import Analysis
from batchscope.analysis.text_table import to_text
from batchscope.records.step_parts import PARTS
from tests.support.synthetic_runs import serial, write_run, write_sweep

DEVICE = {"throughput": {"utilization_pct": 50.0, "memory_peak_gib": 1.0, "mfu": 0.1}}


def test_the_plot_of_the_parts_names_the_step_that_the_table_has(tmp_path):
    for n, size in enumerate((32, 64)):
        write_run(tmp_path / str(n), size, 171.0 + n, throughput={"parts_ms": dict.fromkeys(PARTS, 260 / 6)})
    sweep = find([tmp_path])
    figure = step_time([Analysis(group) for group in sweep.groups])
    above = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert above == ["171 ms", "172 ms"]
    header, *lines = to_text(sweep, 200).splitlines()
    assert "median step ms" in header
    assert ["171" in lines[0].split(), "172" in lines[1].split()] == [True, True]
    assert figure.axes[0].get_ylabel() == "share of the mean step, %"
    assert figure.legends[0].get_title().get_text() == "above a bar: the median step"


def test_the_bars_are_the_interval_of_the_rate_where_one_is_known(tmp_path):
    write_sweep(tmp_path / "old", [32, 64], serial(4, 0.1))
    for n, (size, ms) in enumerate(((32, 8.0), (64, 10.0))):
        write_run(tmp_path / "new" / str(n), size, ms, throughput={"step_ms_interval": [0.9 * ms, 1.25 * ms]})
    shown = {}
    for name in ("old", "new"):
        (axes,) = throughput([Analysis(group) for group in find([tmp_path / name]).groups]).axes
        (bar, _) = axes.containers[0].lines[2][0].get_segments()
        shown[name] = (axes.get_title(loc="left") or axes.get_title(), [round(float(end)) for _, end in bar])
    assert shown["new"] == ("Throughput by the median step; bars: its 95 % interval", [3200, 4444])
    assert shown["old"][0].endswith("bars: from the 10th to the 90th percentile of steps")


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_alone")
def test_many_groups_and_odd_sizes_can_be_drawn(tmp_path):
    for g in range(12):
        sizes = [3, 7, 100] if g % 2 else [1, 1000, 1001]
        write_sweep(tmp_path, sizes, serial(4, 0.1 + g), first=10 * g, options={"model.hidden_size": 2**g}, **DEVICE)
    report = write_report([tmp_path], tmp_path / "out")
    assert len(report.recommendations) == 12
    assert "the step_time plot shows the first 9 groups" in report.notes


@pytest.mark.usefixtures("pictures_alone")
def test_a_name_with_dollar_signs_is_a_name_and_no_formula(tmp_path):
    write_sweep(tmp_path, [32, 64, 128], serial(4, 0.1), model="a$$b$c", **DEVICE)
    assert (tmp_path / "out" / "throughput.png") in write_report([tmp_path], tmp_path / "out").files


def test_memory_is_drawn_from_zero_with_ticks_at_even_distances(tmp_path):
    write_sweep(tmp_path, [32, 64, 128], serial(4, 0.1), **DEVICE)
    *_, axes = device([Analysis(group) for group in find([tmp_path]).groups]).axes
    assert (axes.get_yscale(), axes.get_ylim()[0]) == ("linear", 0)
