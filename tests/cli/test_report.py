"""`batchscope report`: the program around `write_report`."""

import json
from functools import partial

import pytest

from batchscope.cli import report
from tests.cli.support import exit_code

run = partial(exit_code, report)


@pytest.fixture
def sweep(tmp_path):
    for n, (size, ms) in enumerate(((32, 7.2), (64, 10.4), (128, 16.8))):
        record = {
            "schema": 3,
            "status": "finished",
            "choices": {"model": "cnn"},
            "config": {"data": {"batch_size": size}},
            "hardware": {"device": "cpu", "device_name": "A CPU"},
            "throughput": {"step_ms_median": ms, "samples_per_sec": 1e3 * size / ms},
        }
        folder = tmp_path / "sweep" / str(n)
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    return tmp_path / "sweep"


def test_a_missing_folder_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: the following arguments are required: folder; ")


def test_it_prints_the_table_and_the_recommendation_and_says_where_the_report_is(monkeypatch, capsys, sweep):
    assert run(monkeypatch, sweep) == 0
    out = capsys.readouterr().out
    assert "3 runs: 3 finished" in out
    assert "→ No rate is known well enough to compare sizes: the runs measured" in out
    assert out.splitlines()[-1] == f"report   {sweep / 'report' / 'report.html'}"
    assert (sweep / "report" / "sweep.csv").exists()


@pytest.mark.parametrize("status", ["failed", "finished"])
def test_what_a_record_says_sends_nothing_to_the_terminal_but_text(monkeypatch, capsys, tmp_path, status):
    escape = "\x1b]0;title\x07\x9b2J"
    record = {
        "schema": 3,
        "status": status,
        "error": f"it fails {escape}",
        "choices": {"model": f"cnn{escape}"},
        "config": {"data": {"batch_size": 8}},
        "dataset": {"name": f"mnist{escape}"},
        "hardware": {"device": "cpu", "device_name": escape},
        "throughput": {"step_ms_median": 3.0, "samples_per_sec": 2667.0},
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert run(monkeypatch, tmp_path, "--out", tmp_path / "report") == 0
    out = capsys.readouterr().out
    assert "]0;title" in out
    for text in (out, (tmp_path / "report" / "report.md").read_text()):
        assert text.replace("\n", "").isprintable()


def test_out_says_where_the_report_goes(monkeypatch, sweep, tmp_path):
    assert run(monkeypatch, sweep, sweep / "1", "--out", tmp_path / "elsewhere") == 0
    assert (tmp_path / "elsewhere" / "report.md").exists()
    assert not (sweep / "report").exists()


@pytest.mark.slow
def test_a_second_report_does_not_read_the_first(monkeypatch, capsys, sweep):
    run(monkeypatch, sweep)
    run(monkeypatch, sweep)
    assert "note: report" not in capsys.readouterr().out


def test_nothing_to_report_is_one_line_and_exit_code_1(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, tmp_path / "missing") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no runs in")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "missing").exists()


def test_a_misspelt_folder_among_others_is_a_note_and_is_not_made(monkeypatch, capsys, sweep, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, tmp_path / "missing", sweep) == 0
    assert "missing: no such folder" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "missing").exists()


def test_a_report_on_several_folders_replaces_that_of_none(monkeypatch, capsys, sweep, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, sweep / "0", sweep / "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report   outputs/reports/0+1/report.html"
    assert not (sweep / "0" / "report").exists()
