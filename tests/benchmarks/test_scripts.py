"""The smallest case of each script in benchmarks/ runs, and writes no result."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KERNELS = BENCHMARKS.parents[1] / "shared" / "data" / "gpu_kernels"
LINES = {  # command line → what is printed
    "speed.py pipelines": "| bare tensor indexing |",
    "speed.py memory": "| 8 |",
    "monitoring.py": "**SimpleCNN, batch 8**",
    "truth.py": "Worst deviation",
    "causes.py": "| sleep in training_step | 1 | host |",
    "causes.py --device cuda --list": "large batches from pageable memory: transfer",
    "roofline.py": "| 1 | the peak: FLOP/s |",
    "recurrent.py": "| LSTM | 5, 4, 8, 2, 3 |",
    "zoo.py accuracy": "| MLP | rendered-digits |",
    "zoo.py sequences --list": "adding-400-stacked_lstm",
    "answers.py": "| light | 2 |",
    "simulated.py": "| quiet, eight sizes |",
    "noise_scale.py": "| consecutive updates | 0.0 |",
    "compare.py": "| unchanged, side by side | 2 |",
    "diagnose.py": "| that do nothing | 2 |",
    "choose.py": "**cnn**",
    "cuda_trace.py": "",
    "reliability.py": "are bit-identical",
    "scaling.py": "| cnn | 1.69 MB |",
    "time_to_target.py": "| mlp on digits | val/acc 40.0 % |",
}


@pytest.fixture
def unwritten() -> Iterator[None]:
    """Nothing is written to results/."""
    files = [path for path in (BENCHMARKS / "results").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    yield
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_the_smallest_case_runs(line: str, unwritten: None, mnist_files: Path):
    script, *words = line.split()
    command = [sys.executable, str(BENCHMARKS / script), *words, "--smallest", "--root", str(mnist_files)]
    done = subprocess.run(
        command, cwd=BENCHMARKS.parent, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert LINES[line] in done.stdout, done.stdout


def test_every_script_has_a_smallest_case():
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - {"harness.py", "mutations.py"}
    assert scripts == {line.split()[0] for line in LINES}


@pytest.mark.parametrize(
    ("chosen", "sure", "margin", "figures"),
    [
        (32, 0.87, 0.0, [True, True, True, False]),
        (16, 0.80, 0.0, [True, False, True, False]),  # too slow
        (128, 0.99, 0.0, [True, True, False, False]),  # two doublings above 32
        (32, 0.93, 0.0, [True, True, True, True]),
        (32, 0.93, 0.03, [True, True, True, False]),  # the reference may be off by as much
        (None, 0.0, 0.0, [False, False, False, False]),
    ],
)
def test_an_answer_is_judged_by_the_true_shares(chosen, sure, margin, figures, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    judge = runpy.run_path(str(BENCHMARKS / "simulated.py"))["judge"]
    shares = {16: 0.82, 32: 0.92, 64: 0.97, 128: 1.0}
    assert list(judge(chosen, sure, shares, margin).values()) == figures


@pytest.mark.slow
def test_single_operations_are_predicted_on_cards_that_were_not_fitted(tmp_path: Path):
    if not KERNELS.is_dir():
        pytest.skip(f"needs {KERNELS}")
    tool = BENCHMARKS / "device_choice"
    for line in (["measure.py", "--smallest", tmp_path], ["main.py", "--fit", KERNELS, "--test", tmp_path]):
        done = subprocess.run([sys.executable, tool / line[0], *line[1:]], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("1 devices, each predicted from the fitted ones without it.")


@pytest.mark.slow
def test_of_cards_that_were_not_fitted_few_are_called_the_first_that_are_not():
    if not KERNELS.is_dir():
        pytest.skip(f"needs {KERNELS}")
    command = [sys.executable, BENCHMARKS / "device_choice" / "orders.py", "--fit", KERNELS]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    answers, first, false, *_ = map(float, next(line for line in lines if line.startswith("operation")).split()[1:])
    assert answers == 8000 and first > 40 and false < 2.5


def test_mutations_of_every_kind_are_drawn_and_found_again():
    script = runpy.run_path(str(BENCHMARKS / "mutations.py"))
    source = BENCHMARKS.parent / "src" / "checkpointing"
    drawn = script["draw"](source, 0, 10)
    assert drawn == script["draw"](source, 0, 15)[:10]
    by_kind = {each["kind"]: each for each in drawn}
    assert set(by_kind) == set(script["KINDS"])
    for each in by_kind.values():
        assert each["before"] != each["after"]
        compile(script["mutated"](source / each["file"], script["locate"](source, each))[1], each["file"], "exec")
