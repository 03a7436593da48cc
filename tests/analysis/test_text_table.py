"""The table of a sweep in a terminal: what has room, and in which order columns go."""

import pytest

from batchscope.analysis.read import find
from batchscope.analysis.text_table import to_text
from tests.support.synthetic_runs import serial, write_run, write_sweep

FACTS = {"processor_time_pct": 96.0, "memory_peak_gib": 1.25, "mfu": 0.31, "samples_per_sec_fit": 5000.0}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder, [64, 1024, 2048], serial(4, 0.1), metrics={"test/acc": 0.98}, throughput=FACTS)
    write_sweep(folder, [64, 1024], serial(4, 0.1), first=3, model="stacked_lstm", throughput=FACTS)
    write_run(folder / "5", 4096, status="failed", error="ValueError: " + 20 * "a long story ")
    return find([folder])


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_it_fits_and_is_aligned(sweep, width):
    lines = to_text(sweep, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("batch" in line for line in lines)
    assert sum("stacked_lstm" in line for line in lines) == 2
    assert sum("9,810" in line for line in lines) == 1  # the rate of the largest batch


def test_a_wide_terminal_shows_everything_with_headings_in_one_line(sweep):
    text = to_text(sweep, 300)
    assert "without" not in text
    header = text.splitlines()[0]
    for heading in ("fit samples/s", "p10–p90", "mean wait/copy/fwd/bwd/opt/other %", "peak GiB", "why not finished"):
        assert heading in header


def test_what_a_narrow_one_leaves_out_is_said(sweep):
    text = to_text(sweep, 80)
    said = " ".join(text.split("(without ")[1].split())
    assert said.startswith("fit samples/s, mean wait/copy/fwd/bwd/opt/other %")
    assert said.endswith("see report.md)")
    header = text.partition("\n0")[0]
    assert "samples/s" in header and "test/acc" in header


def test_a_long_reason_is_cut_and_not_dropped(sweep):
    (row,) = [line for line in to_text(sweep, 80).splitlines() if "ValueError" in line]
    assert row.endswith("…")
