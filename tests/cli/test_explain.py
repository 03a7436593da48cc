"""`batchscope explain`: of a run's folder and of options; what it writes, and what it refuses in one line."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscope.callbacks import _analysis
from batchscope.cli import explain
from batchscope.records.explanation import FILE, TRACE
from tests.checkpointing.support import interrupt, terminate
from tests.cli.conftest import SIZES
from tests.support.command_lines import answer
from tests.support.devices import CPU
from tests.support.explanations import explanation
from tests.support.runs import Run

QUICK = ["--steps", "2", "--warmup", "1"]


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("batchscope.callbacks._analysis.find_calibration", lambda device, measure: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refused(*words: object) -> str:
    """The one line that the command ends with."""
    found = answer("explain", *words)
    (line,) = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert found.code == 1 and "Traceback" not in found.err
    return line.removeprefix("error: ")


def snapshot(folder: Path) -> dict[str, Any]:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): data for path, data in files.items()}


def test_the_newest_run_is_explained_and_nothing_else_in_its_folder_changes(run_dir, root, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    run_dir = Path(shutil.move(run_dir, "outputs/runs/one"))
    before = snapshot(run_dir)
    said = answer("explain", "last", root, *QUICK)
    after = snapshot(run_dir)
    assert {name: data for name, data in after.items() if not name.startswith("explain/")} == before
    assert set(after) - set(before) == {f"explain/{FILE}", f"explain/{TRACE}"}
    step = json.loads(after[f"explain/{FILE}"])
    assert (step["title"], step["batch_size"], step["trace_steps"]) == ("cnn · rendered-digits", 16, 3)
    assert {"model.features.0", "model.classifier.1"} <= {row["module"] for row in step["modules"]}
    assert "costliest operations" in said.out
    assert "explain  outputs/runs/one/explain/explain.json" in said.out


BOTH = "these steps say arithmetic (99 % of the step), the run's record says Python and framework overhead (99 % of the step)"
VERDICTS = {  # what the run's record says, another option → the kind and the evidence of these steps, which say compute
    "the same": ("compute", (), "compute", "compute"),
    "another one": ("host", (), "unclear", BOTH),
    "another one with another option": ("host", ("data.batch_size=8",), "compute", "compute"),
    "none": ("unclear", (), "compute", "compute"),
    "a stranger's": (None, (), "compute", "compute"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_that_contradicts_the_runs_record_is_unclear_and_both_are_said(name, run_dir, root, monkeypatch):
    old, options, kind, evidence = VERDICTS[name]
    new = {"kind": "compute", "share": 0.99, "certainty": "clear", "evidence": "compute", "busy": False}
    record = json.loads((run_dir / "run.json").read_text())
    record["throughput"] = record["throughput"] | {"bottleneck": new | {"kind": old}} if old else []
    (run_dir / "run.json").write_text(json.dumps(record))
    step = replace(explanation(), device="cpu", device_name=record["hardware"]["device_name"], bottleneck=new)
    monkeypatch.setattr("batchscope.training.explain.explain", lambda *args: (step, {}))
    said = answer("explain", run_dir, root, *options).out
    found = json.loads((run_dir / "explain" / FILE).read_text())["bottleneck"]
    assert (found["kind"], found["evidence"]) == (kind, evidence)
    assert f"limit: {'unclear: ' if kind == 'unclear' else ''}{evidence}" in " ".join(said.split())


def test_options_change_what_is_explained(run_dir: Path, root: str) -> None:
    out = run_dir.parent / "out"
    found = json.loads(answer("explain", run_dir, root, "data={batch_size: 8}", *QUICK, "--json", "--out", out).out)
    assert (found["title"], found["batch_size"], found["folder"]) == ("cnn · rendered-digits", 8, str(out))
    assert (out / FILE).is_file()
    assert not (run_dir / "explain").exists()


def test_without_a_run_options_are_enough(tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = answer("explain", "model=mlp", "data=digits", root, *SIZES, "trainer.accelerator=cpu", *QUICK)
    assert "mlp · rendered-digits, batches of 16" in found.out
    (folder,) = (tmp_path / "outputs" / "explain").iterdir()
    assert {path.name for path in folder.iterdir()} == {FILE, TRACE}
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


@pytest.mark.slow
def test_with_measured_peaks_the_table_has_lower_bounds(run_dir: Path, root: str, monkeypatch) -> None:
    monkeypatch.setattr("batchscope.callbacks._analysis.find_calibration", lambda device, measure: CPU)
    assert "bound/time" in answer("explain", run_dir, root, *QUICK).out


def test_a_read_only_disk_is_explained_in_print(run_dir: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, files: dict[str, bytes]) -> Path:
        raise OSError(30, "Read-only file system", str(folder))

    monkeypatch.setattr(explain, "write_folder", refuse)
    said = answer("explain", run_dir, root, *QUICK)
    assert "costliest operations" in said.out
    assert "trace.json.gz" not in said.out
    assert "cannot be written" in said.err


def test_a_place_that_only_the_command_line_decides_has_to_be_typed(run_dir: Path, root: str) -> None:
    assert (said := refused(run_dir)).startswith("data.root: is ") and root in said


def measure_nothing() -> None:
    """In the process of a test: where the cache is empty, to measure the processor takes ten seconds."""
    _analysis.find_calibration = lambda device, measure: None


@pytest.mark.parametrize(
    ("sent", "name", "where", "call"),
    [
        (interrupt, "SIGINT", "batchscope.training.task.Task.training_step", 8),  # in a traced step
        (terminate, "SIGTERM", "batchscope.files.write_bytes", 2),
    ],
)
def test_an_interruption_is_one_line_and_leaves_nothing(sent, name, where, call, tmp_path):
    words = ["model=mlp", "data=digits", "data.root=.", *SIZES, "trainer.accelerator=cpu", *QUICK, "--out", "here/out"]
    faults = [("batchscope.training.explain.explain", 1, measure_nothing), (where, call, sent)]
    done = Run(tmp_path, *words, module="batchscope.cli.explain", faults=faults)
    assert done.end() == 128 + getattr(signal, name)
    lines = [line for line in done.complained.splitlines() if line and "rendered" not in line]
    assert lines == [f"explain: stopped by {name}; nothing was written"]
    assert "a step takes" not in done.said
    assert not list(tmp_path.glob("here/*"))


def test_a_link_out_of_the_runs_folder_is_refused(run_dir: Path, root: str, tmp_path: Path) -> None:
    (run_dir / "explain").symlink_to(tmp_path)
    assert "is a link that leads out" in refused(run_dir, root)


def test_a_step_that_fails_is_one_line(run_dir: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise RuntimeError("shapes (3) and (4) differ\nat the second line")

    monkeypatch.setattr("batchscope.training.task.Task.training_step", fail)
    said = refused(run_dir, root, *QUICK)
    assert said.endswith("a training step of cnn · rendered-digits fails: RuntimeError: shapes (3) and (4) differ")
    assert not (run_dir / "explain").exists()
