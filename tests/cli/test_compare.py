"""`batchscope compare`: the words of its command line, its output, and its exit codes."""

import json
from functools import partial

import numpy as np
import pytest

from batchscope.cli import compare
from tests.cli.support import exit_code
from tests.support.synthetic_runs import write_run, write_steps

run = partial(exit_code, compare)


@pytest.fixture
def runs(tmp_path):
    steps = np.exp(0.02 * np.random.default_rng(0).standard_normal((8, 10)))
    return [write_steps(write_run(tmp_path / name, 64, ms), ms * steps) for name, ms in (("a", 10.0), ("b", 16.0))]


def test_a_slowdown_is_exit_code_3_and_its_absence_0(monkeypatch, capsys, runs):
    assert run(monkeypatch, *runs) == 3
    assert capsys.readouterr().out.startswith("B is slower: a sample takes 1.60 times as long (")
    assert run(monkeypatch, *runs[::-1]) == 0
    assert run(monkeypatch, *runs, "--max-slowdown", "70%") == 0


def test_json_is_one_document(monkeypatch, capsys, runs):
    assert run(monkeypatch, *runs, "--json") == 3
    assert json.loads(capsys.readouterr().out)["regression"] is True


def test_what_separate_runs_differ_by_can_be_said(monkeypatch, runs):
    assert run(monkeypatch, *runs) == 3
    assert run(monkeypatch, *runs, "--between-runs", "30%") == 0


@pytest.mark.parametrize(
    ("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("12.5 %", 0.125), ("0", 0.0), ("200%", 2.0)]
)
def test_a_share_is_a_percentage_or_a_fraction(text, value):
    assert compare.fraction(text) == pytest.approx(value)


@pytest.mark.parametrize("words", [["--max-slowdown", "5"], ["--max-slowdown", "-5%"], ["--max-slowdown", "nan"]])
def test_a_share_that_may_be_meant_in_another_way_is_refused(monkeypatch, capsys, runs, words):
    assert run(monkeypatch, *runs, f"{words[0]}={words[1]}") == 2
    assert capsys.readouterr().err.startswith("error: argument --max-slowdown: takes a share such as 5% or 0.05")


@pytest.mark.parametrize("damage", ["no folder", "no run", "empty", "torn", "newer", "strange", "link"])
def test_a_folder_that_is_no_run_is_one_line(monkeypatch, capsys, runs, tmp_path, damage):
    folder, text = tmp_path / "x", {"torn": "{", "newer": '{"schema": 99}', "strange": '{"schema": 3, "config": 7}'}
    if damage != "no folder":
        folder.mkdir()
    if damage in text:
        (folder / "run.json").write_text(text[damage])
    if damage == "no run":
        (folder / "file").write_text("")
    if damage == "link":
        (folder / "run.json").symlink_to(folder / "run.json")
    assert run(monkeypatch, runs[0], folder) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: no runs in ")
    assert said.err.count("\n") == 1


def test_hostile_numbers_and_steps_are_no_traceback(monkeypatch, capsys, runs):
    path = runs[1] / "run.json"
    record = json.loads(path.read_text())
    record["throughput"] |= {"step_ms_interval": ["a", None], "others_share": "\x1b[2J", "samples_per_sec_mean": 1e400}
    record["throughput"] |= {"parts_ms": {"forward": float("nan")}, "updates": [], "samples_per_sec_fit": -1}
    record["versions"] = {"torch": "\x1b[31m2.9", "x": ["y"] * 3, "n": None}
    record["rerun"] = {"of": ["x"], "pair": True}
    path.write_text(json.dumps(record))
    (runs[1] / "steps.npz").write_bytes(b"PK\x03\x04")
    assert run(monkeypatch, *runs) in (0, 3)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "steps.npz: cannot be read" in " ".join(said.split())


def test_options_without_rerun_are_refused(monkeypatch, capsys, runs):
    assert run(monkeypatch, *runs, "data.batch_size=8") == 2
    assert "options are for --rerun" in capsys.readouterr().err
    assert run(monkeypatch, runs[0]) == 2
    assert run(monkeypatch, *runs, "--rerun", "--passes", "4") == 2


@pytest.mark.parametrize(
    ("words", "option"),
    [(["--passes", "7"], "--passes"), (["--python-b", "x"], "--python-b"), (["--out", "x"], "--out")],
)
def test_what_rerun_takes_is_refused_without_it(monkeypatch, capsys, runs, words, option):
    assert run(monkeypatch, *runs, *words) == 2
    assert capsys.readouterr().err == f"error: {option}: is for --rerun, which runs both again\n"


def test_rerun_compares_the_new_runs(monkeypatch, capsys, runs, tmp_path):
    def rerun(folders, out, most, seconds, pythons, overrides, max_slowdown, quiet):
        assert (most, seconds, pythons[1], overrides, quiet) == (5, 2.0, "other", ["data.root=x"], True)
        return folders[::-1]

    monkeypatch.setattr("batchscope.sweep.rerun.rerun", rerun)
    words = ["--rerun", "--passes", 5, "--seconds", 2, "--python-b", "other", "data.root=x", "--json"]
    assert run(monkeypatch, *runs, *words) == 0
    assert json.loads(capsys.readouterr().out)["a"].endswith("/b")
