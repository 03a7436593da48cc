"""`batchscope report`: the program around `write_report`."""

from pathlib import Path

import pytest

from tests.support.command_lines import answer
from tests.support.synthetic_runs import write_run, write_sweep


def test_it_prints_the_table_and_the_recommendation_and_says_where_the_report_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sweep = write_sweep(Path("sweep"), [32, 64, 128], lambda size: 4 + 0.1 * size)
    found = answer("report", sweep / "0", sweep / "1")  # a report on several folders replaces that of none
    assert (found.code, found.out.splitlines()[-1]) == (0, "report   outputs/reports/0+1/report.html")
    assert not [*sweep.rglob("report")]
    found = answer("report", sweep)
    assert (found.code, found.out.splitlines()[-1]) == (0, "report   sweep/report/report.html")
    assert "3 runs: 3 finished" in found.out
    assert "→ No rate is known well enough to compare sizes: the runs measured" in found.out
    assert (sweep / "report" / "sweep.csv").exists()
    assert "note: report" not in answer("report", sweep).out  # a second report does not read the first


@pytest.mark.parametrize("status", ["failed", "finished"])
def test_what_a_record_says_sends_nothing_to_the_terminal_but_text(tmp_path, status):
    escape = "\x1b]0;title\x07\x9b2J"
    words = {"model": f"cnn{escape}", "device_name": escape, "error": f"it fails {escape}"}
    write_run(tmp_path / "run", 8, 3.0, status=status, options={"data.root": escape}, **words)
    found = answer("report", tmp_path / "run", "--out", tmp_path / "report")
    assert found.code == 0
    assert "]0;title" in found.out
    for text in (found.out, (tmp_path / "report" / "report.md").read_text()):
        assert text.replace("\n", "").isprintable()
