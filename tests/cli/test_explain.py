"""`batchscope explain`: of a run's folder or of options; what it writes, and what it refuses in one line."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from batchscope.records.explanation import FILE, TRACE
from batchscope.training import explain
from tests.checkpointing.support import interrupt
from tests.cli.conftest import SIZES, contents
from tests.support.command_lines import answer
from tests.support.devices import CPU
from tests.support.explanations import explanation
from tests.support.runs import Run, record
from tests.support.synthetic_runs import change_record

STEP = "batchscope.training.task.Task.training_step"


@pytest.fixture
def run_dir(finished, tmp_path, monkeypatch):
    """A copy of the finished run, in outputs/runs of the working directory. No peak is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("batchscope.hardware.measure.find_calibration", lambda device, measure: None)
    monkeypatch.setattr(explain, "WARMUP", 1)
    monkeypatch.setattr(explain, "STEPS", 2)
    return Path(shutil.copytree(finished, "outputs/runs/one"))


def test_the_newest_run_is_explained_and_nothing_else_in_its_folder_changes(run_dir, root):
    before, folder = contents(run_dir), run_dir / "explain"
    result = answer("explain", "last", root)
    after = contents(run_dir)
    step = json.loads(after.pop(folder / FILE))
    assert after.pop(folder / TRACE) and not after.pop(folder) and after == before
    assert (step["title"], step["batch_size"], step["trace_steps"]) == ("cnn · rendered-digits", 16, 3)
    assert {"model.features.0", "model.classifier.1"} <= {row["module"] for row in step["operations"]}
    assert "costliest operations" in result.out
    assert "explain  outputs/runs/one/explain/explain.json" in result.out


def test_the_limit_that_the_run_has_found_is_a_note_beside_the_one_that_is_measured(run_dir, root, monkeypatch):
    bottleneck = {"kind": "compute", "share": 0.99, "certainty": "clear", "evidence": "these steps", "busy": False}
    step = replace(explanation(), bottleneck=bottleneck)
    monkeypatch.setattr("batchscope.training.explain.explain", lambda *args: (step, {}))
    throughput = record(run_dir)["throughput"]
    for evidence, is_noted in (("its record", True), (7, False), ("\x1b[2J", False)):
        change_record(run_dir, throughput=throughput | {"bottleneck": bottleneck | {"evidence": evidence}})
        stdout = answer("explain", run_dir, root).out
        assert "limit: these steps" in stdout
        assert ("note     in the run, its record" in stdout) is is_noted


def test_what_the_run_says_of_its_epochs_is_a_note(run_dir, root, monkeypatch):
    monkeypatch.setattr("batchscope.training.explain.explain", lambda *args: (explanation(), {}))
    epoch = {"seconds": 8.0, "starting_workers_s": 3.0, "advice": "DataLoader(persistent_workers=True)"}
    change_record(run_dir, throughput=record(run_dir)["throughput"] | {"epoch": epoch})
    note = "note     in the run, an epoch of 8 s begins with 3 s of starting workers"
    assert note in answer("explain", run_dir, root).out


@pytest.mark.parametrize("evidence", ["rank 1 is slow", 7, "\x1b[2J", None])
def test_of_a_run_of_several_processes_one_is_explained_and_the_slow_rank_is_said(run_dir, root, monkeypatch, evidence):
    monkeypatch.setattr("batchscope.training.explain.explain", lambda *args: (explanation(), {}))
    change_record(run_dir, processes=2, throughput={"slow_rank": {"evidence": evidence}})
    stdout = " ".join(answer("explain", run_dir, root).out.split())  # in a terminal of any width
    assert "note the run used 2 processes; one of them is explained, without communication" in stdout
    assert ("in the run, " in stdout) == ("note in the run, rank 1 is slow" in stdout) == (evidence == "rank 1 is slow")


def test_options_change_what_is_explained_and_where_it_is_written(run_dir, root):
    assert answer("explain", run_dir, root, "data={batch_size: 8}", "--out", "out").code == 0
    step = json.loads(Path("out", FILE).read_text())
    assert (step["title"], step["batch_size"]) == ("cnn · rendered-digits", 8)
    assert not (run_dir / "explain").exists()


def test_a_class_in_place_of_a_choice_is_not_called_by_it(run_dir, root, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "batchscope.training.explain.explain", lambda config, choices, *_: calls.append(choices) or (explanation(), {})
    )
    answer("explain", run_dir, root, "model._target_=batchscope.models.cnn.SimpleCNN")
    assert calls == [{"data": "digits"}]


def test_without_a_run_options_are_enough_and_with_peaks_there_are_lower_bounds(run_dir, root, monkeypatch):
    monkeypatch.setattr("batchscope.hardware.measure.find_calibration", lambda device, measure: CPU)
    result = answer("explain", "model=mlp", "data=digits", root, *SIZES, "trainer.accelerator=cpu")
    assert "mlp · rendered-digits, batches of 16" in result.out
    assert "bound/time" in result.out
    (folder,) = Path("outputs/explain").iterdir()
    assert {path.name for path in folder.iterdir()} == {FILE, TRACE}


def test_what_cannot_be_written_is_explained_in_print(run_dir, root):
    Path("file").touch()
    result = answer("explain", run_dir, root, "--out", "file/out")
    assert "costliest operations" in result.out
    assert "trace.json.gz" not in result.out
    assert "cannot be written" in result.err


def test_an_interruption_leaves_nothing(tmp_path):
    words = ["model=mlp", "data=digits", "data.root=.", *SIZES, "trainer.accelerator=cpu", "--out", "here/out"]
    process = Run(tmp_path, *words, module="batchscope.cli.explain", faults=[(STEP, 15, interrupt)])
    assert process.end() == 128 + signal.SIGINT
    assert "a step takes" not in process.said and "Traceback" not in process.complained
    assert not list(tmp_path.glob("here/*"))


def test_what_cannot_be_explained_is_refused_in_one_line(run_dir, root, monkeypatch):
    def refused(*words):
        code, out, err = answer("explain", run_dir, *words)
        assert (code, out) == (1, "")
        return err.splitlines()[-1]

    moved_data = dict(record(run_dir)["config"]["data"], root="nowhere")
    config = record(run_dir)["config"]
    change_record(run_dir, config=config | {"data": moved_data})
    assert refused().startswith(
        "error: data.root: is 'nowhere' in outputs/runs/one/run.json, and a file alone does not decide that"
    )
    change_record(run_dir, config=config)
    monkeypatch.setattr(STEP, lambda self, *args: 1 / 0)
    message = "a training step of cnn · rendered-digits fails: ZeroDivisionError: division by zero"
    assert refused(root).endswith(message)
    assert not (run_dir / "explain").exists()
    (run_dir / "explain").symlink_to(Path.cwd())
    assert "is a link that leads out" in refused(root)
