"""The smallest case of each script in benchmarks/ runs, and writes no result."""

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
    "speed.py epoch": "| plain loop |",
    "speed.py pipelines": "| bare tensor indexing |",
    "speed.py memory": "| SimpleCNN | 8 |",
    "speed.py augmentation": "| 1×28×28 | 8 | all four |",
    "speed.py refusal": "| `modle=cnn` |",
    "monitoring.py": "**SimpleCNN, batch 8**",
    "monitoring.py --long": "| 500 |",
    "truth.py": "Worst deviation",
    "causes.py": "| sleep in training_step | 1 | host |",
    "causes.py --device cuda --list": "large batches from pageable memory: transfer",
    "roofline.py peaks": "| 1 | the peak: FLOP/s |",
    "roofline.py steps": "| mlp | 8 | 1 |",
    "recurrent.py": "| LSTM | 5, 4, 8, 2, 3 |",
    "zoo.py zoo": "| MLP | rendered-digits |",
    "zoo.py sequences --list": "adding-400-stacked_lstm",
    "answers.py": "| light | 1 |",
    "simulated.py": "| quiet, 20 passes |",
    "compare.py": "| unchanged, side by side | 2 |",
    "choose.py": "**cnn**",
    "cuda_trace.py": "",
    "reliability.py": "are bit-identical",
    "scaling.py": "| cnn | 1.69 MB |",
}
IN_PROCESS = (
    "speed.py augmentation",
    "monitoring.py --long",
    "causes.py --device cuda --list",
    "zoo.py sequences --list",
)


@pytest.fixture
def unwritten() -> Iterator[None]:
    """Nothing is written to results/."""
    files = [path for path in (BENCHMARKS / "results").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    yield
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.parametrize("line", IN_PROCESS)
def test_the_smallest_case_runs(
    line: str, unwritten: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script, *words = line.split()
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [script, *words, "--smallest"])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    assert LINES[line] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line not in IN_PROCESS])
def test_the_smallest_case_runs_in_a_process(line: str, unwritten: None, mnist_files: Path):
    script, *words = line.split()
    command = [sys.executable, str(BENCHMARKS / script), *words, "--smallest", "--root", str(mnist_files)]
    done = subprocess.run(
        command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert LINES[line] in done.stdout, done.stdout


def test_every_script_has_a_smallest_case():
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if "arguments(__doc__" in path.read_text()}
    assert scripts == {line.split()[0] for line in LINES}


@pytest.mark.slow
def test_single_operations_are_predicted_on_cards_that_were_not_fitted(tmp_path: Path):
    if not KERNELS.is_dir():
        pytest.skip(f"needs {KERNELS}")
    run = [sys.executable, str(BENCHMARKS / "device_choice" / "measure.py"), "--smallest", str(tmp_path)]
    subprocess.run(run, check=True, capture_output=True)
    run = [
        sys.executable,
        str(BENCHMARKS / "device_choice" / "main.py"),
        "--fit",
        str(KERNELS),
        "--test",
        str(tmp_path),
    ]
    assert (
        "1 devices, predicted from 5 others." in subprocess.run(run, check=True, capture_output=True, text=True).stdout
    )


def test_mutations_of_every_kind_are_drawn_and_found_again():
    script = runpy.run_path(str(BENCHMARKS / "mutations.py"))
    source = BENCHMARKS.parent / "src"
    drawn = script["draw"](source, 0, 20)
    assert drawn == script["draw"](source, 0, 25)[:20]
    assert {each["kind"] for each in drawn} == set(script["KINDS"])
    for each in drawn:
        assert each["before"] != each["after"]
        compile(script["mutated"](source / each["file"], script["locate"](source, each))[1], each["file"], "exec")
