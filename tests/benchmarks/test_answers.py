"""answers.py: claims are judged by what is known better, loads are as heavy as promised, and its parts run."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from answer_parts import load, others, simulated
from answer_parts.attack import GRID, one, row, summary
from answer_parts.claims import Reference, why_false

from batchscope.analysis.answer import answer
from batchscope.analysis.read import find

RATES = {8: 50.0, 64: 89.0, 256: 100.0}
MEASURED = {8: 0.02, 64: 0.02, 256: 0.02}


@pytest.mark.parametrize(
    ("claim", "size", "off", "is_true"),
    [
        ({"kind": "fastest", "among": [8, 64, 256]}, 256, {}, True),
        ({"kind": "fastest", "among": [8, 64, 256]}, 64, {}, False),
        ({"kind": "fastest", "among": [8, 64]}, 64, {}, True),
        ({"kind": "reaches", "among": [8, 64, 256], "share": 0.9}, 64, {}, True),
        ({"kind": "reaches", "among": [8, 64, 256], "share": 0.9}, 8, {}, False),
        ({"kind": "share", "of": 256, "share": 0.54}, 8, {}, True),
        ({"kind": "share", "of": 256, "share": 0.56}, 8, {}, False),
        ({"kind": "share", "of": 256, "share": 0.56}, 8, MEASURED, True),
        ({"kind": "at_most", "of": 256, "share": 0.51}, 8, {}, True),
        ({"kind": "at_most", "of": 256, "share": 0.49}, 8, {}, False),
        ({"kind": "at_most", "of": 256, "share": 0.49}, 8, MEASURED, True),
        ({"kind": "at_least", "of": 8, "share": 1.9}, 256, {}, True),
        ({"kind": "at_least", "of": 8, "share": 2.1}, 256, {}, False),
        ({"kind": "worse", "metric": "test/acc"}, 256, {}, True),
        ({"kind": "worse", "metric": "test/acc"}, 64, {}, False),
    ],
)
def test_a_claim_is_judged_by_the_reference(claim: dict[str, Any], size: int, off: dict[int, float], is_true: bool):
    truth = Reference(RATES, off, metrics={8: 0.98, 64: 0.98, 256: 0.97})
    assert (why_false({"batch_size": size, **claim}, truth) is None) is is_true


def test_of_equal_rates_none_is_the_fastest_unless_they_were_measured():
    claim = {"kind": "fastest", "batch_size": 8, "among": [8, 64]}
    assert why_false(claim, Reference({8: 1.0, 64: 1.0})) == "fastest 8: it has 1.000 of the rate of 64"
    assert why_false(claim, Reference({8: 1.0, 64: 1.0}, {8: 0.01, 64: 0.01})) is None


def test_a_claim_of_an_unknown_kind_cannot_be_judged():
    with pytest.raises(ValueError, match="no such kind"):
        why_false({"kind": "cheapest", "batch_size": 8}, Reference(RATES))


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize(("condition", "low", "high"), [("light", 0.1, 0.2), ("bursts", 0.45, 0.55)])
def test_a_load_is_as_heavy_as_promised(condition: str, low: float, high: float, count: int):
    slices = list(itertools.islice(load.SCHEDULES[condition](0, count), 20_000))
    busy, idle = (sum(column) for column in zip(*slices, strict=True))
    assert low <= busy / (busy + idle) * load.processes_of(condition, count) / count <= high
    longest = {"light": 0.008, "bursts": 3.0}[condition]
    assert longest / 2 < max(busy for busy, _ in slices) <= longest


def test_the_processes_of_a_load_end_with_it():
    before = set(psutil.Process().children())
    with load.beside("bursts", seed=0):
        started = set(psutil.Process().children()) - before
        assert len(started) == load.cores()
    assert not any(each.is_running() for each in started)


def test_a_load_whose_parent_is_gone_ends():
    orphan = subprocess.Popen([sys.executable, load.__file__, "light", "0", "0"])
    assert orphan.wait(timeout=60) == 0


def test_simulated_windows_have_the_promised_noise_and_rates():
    noise = simulated.Noise(window=0.1, alike=0.5, busy=0.5)
    runs = simulated.simulate(simulated.Truth({8: 100.0, 64: 400.0}), noise, 2000, np.random.default_rng(0))
    for run, rate in zip(runs, (100.0, 400.0), strict=True):
        log_s = np.log(run.steps.medians() / run.batch_size)
        calm = log_s[run.steps.others_share < 0.1] + np.log(rate)
        assert calm.mean() == pytest.approx(0, abs=0.02)
        assert calm.std() == pytest.approx(0.1, rel=0.1)
        assert (run.steps.others_share > 0.25).mean() == pytest.approx(0.5, abs=0.1)


def test_a_simulated_sweep_on_disk_has_the_answer_of_the_one_in_memory(tmp_path: Path):
    truth = simulated.Truth({8: 100.0, 64: 400.0}, {8: 0.9, 64: 0.8})
    runs = simulated.simulate(truth, simulated.Noise(0.05), 12, np.random.default_rng(0))
    simulated.write(tmp_path, runs)
    on_disk = answer(find([tmp_path]).groups[0], [simulated.METRIC])
    in_memory = answer(simulated.group(runs), [simulated.METRIC])
    assert on_disk.claims == in_memory.claims != []
    assert on_disk.lines == in_memory.lines


def test_simulated_sweeps_and_diagnoses_are_judged(tmp_path: Path):
    found = others.simulated_sweep(tmp_path / "sweep", 1)
    assert found["false"] == []
    assert found["lines"]
    helped = others.simulated_diagnosis(tmp_path / "diagnosis", 1)
    assert helped == {"recommended": ["data.num_workers=1"], "helps": True, "false": []}


def test_what_was_measured_is_kept(tmp_path: Path):
    calls: list[int] = []
    for _ in range(2):
        assert others.kept(tmp_path / "a" / "0", lambda: calls.append(1) or {"seconds": 1}) == {"seconds": 1}
    assert len(calls) == 1


def test_a_row_of_the_attack_counts_false_claims():
    found = [one(GRID[0], seed) for seed in range(2)]
    found[0]["false"] = ["share"]
    assert row("quiet", summary(found)).startswith("| quiet | 50.0% | share 1 of ")


@pytest.mark.slow
def test_the_smallest_case_of_every_part_runs(tmp_path: Path, mnist_files: Path):
    line = ["--smallest", "--root", str(mnist_files), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "answers.py"), *line], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| light | 1 |" in done.stdout
    assert "| compare, 0% slower | 1 |" in done.stdout
    assert "| diagnose | 2 |" in done.stdout
