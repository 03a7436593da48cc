"""`batchscope compare`: the words of its command line, its output, its exit codes."""

import json

import numpy as np
import pytest

from batchscope.cli import compare
from tests.support.command_lines import answer
from tests.support.runs import record
from tests.support.synthetic_runs import change_record, write_run, write_steps


@pytest.fixture
def runs(tmp_path):
    steps = np.exp(0.02 * np.random.default_rng(0).standard_normal((8, 10)))
    return [write_steps(write_run(tmp_path / name, 64, ms), ms * steps) for name, ms in (("a", 10.0), ("b", 16.0))]


def test_a_slowdown_is_exit_code_3_and_its_absence_0(runs):
    found = answer("compare", *runs)
    assert (found.code, found.out[:48]) == (3, "B is slower: a sample takes 1.60 times as long (")
    found = answer("compare", *runs, "--json")
    assert (found.code, json.loads(found.out)["regression"]) == (3, True)
    assert answer("compare", *runs[::-1]).code == 0
    assert answer("compare", *runs, "--max-slowdown", "70%").code == 0


@pytest.mark.parametrize(
    ("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("12.5 %", 0.125), ("0", 0.0), ("200%", 2.0)]
)
def test_a_share_is_a_percentage_or_a_fraction(text, value):
    assert compare.fraction(text) == pytest.approx(value)


def test_hostile_numbers_and_steps_are_no_traceback(runs):
    cost = {"step_ms_interval": ["a", None], "others_share": "\x1b[2J", "samples_per_sec_mean": 1e400}
    cost |= {"parts_ms": {"forward": float("nan")}, "updates": [], "samples_per_sec_fit": -1}
    versions = {"torch": "\x1b[31m2.9", "x": ["y"] * 3, "n": None}
    change_record(
        runs[1], throughput=record(runs[1])["throughput"] | cost, versions=versions, rerun={"of": ["x"], "pair": True}
    )
    (runs[1] / "steps.npz").write_bytes(b"PK\x03\x04")
    found = answer("compare", *runs)
    assert found.code in (0, 3) and "\x1b" not in found.out
    assert "steps.npz: cannot be read" in " ".join(found.out.split())


def test_rerun_compares_the_new_runs(monkeypatch, runs):
    def rerun(folders, out, most, seconds, pythons, overrides, max_slowdown, quiet):
        assert (most, seconds, pythons[1], overrides, quiet) == (5, 2.0, "other", ["data.root=x"], True)
        return folders[::-1]

    monkeypatch.setattr("batchscope.sweep.rerun.rerun", rerun)
    words = ["--rerun", "--passes", 5, "--seconds", 2, "--python-b", "other", "data.root=x", "--json"]
    found = answer("compare", *runs, *words)
    assert (found.code, json.loads(found.out)["a"][-2:]) == (0, "/b")
