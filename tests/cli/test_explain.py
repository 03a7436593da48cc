"""`batchscope explain`: of a run's folder and of options; what it writes, and what it refuses in one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscope.cli import explain
from batchscope.options.compose import check_command_line
from batchscope.records.explanation import FILE, TRACE
from batchscope.training.run import train
from tests.support.devices import CPU
from tests.support.explanations import explanation
from tests.support.runs import Run

SIZES = ["data.num_train=64", "data.num_val=32", "data.num_test=16", "data.batch_size=16"]
Call, Refusal = Callable[..., Any], Callable[..., str]
QUICK = ["--steps", "2", "--warmup", "1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short finished run on rendered digits."""
    folder = tmp_path_factory.mktemp("explain")
    line = ["data=digits", f"data.root={folder}", *SIZES, "trainer.max_epochs=1", "callbacks.progress=null"]
    line += ["callbacks.throughput.calibrate=false", "trainer.accelerator=cpu", f"run_dir={folder / 'run'}"]
    line += ["+callbacks.throughput.flops_per_sample=1", "callbacks.memory=null"]
    config = check_command_line(line, multirun=False)[0]
    train(config, folder / "run", {"model": "cnn", "data": "digits"}, line)
    return folder / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def root(finished: Path) -> str:
    """The run's own `data.root=…`, which a record alone does not decide."""
    return f"data.root={finished.parent}"


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("batchscope.callbacks.profile.find_calibration", lambda device, measure: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command; returns what it printed."""

    def run(*words: str | Path) -> Any:
        monkeypatch.setattr(sys, "argv", ["batchscope", *map(str, words)])
        explain.main()
        return capfd.readouterr()

    return run


@pytest.fixture
def refusal(call: Call, capfd: pytest.CaptureFixture[str]) -> Refusal:
    """Runs the command; returns the one line that it ends with."""

    def run(*words: str | Path) -> str:
        with pytest.raises(SystemExit) as end:
            call(*words)
        said = capfd.readouterr().err
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert end.value.code in (1, 2) and "Traceback" not in said
        return line.removeprefix("error: ")

    return run


def snapshot(folder: Path) -> dict[str, Any]:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): data for path, data in files.items()}


def test_a_run_is_explained_and_nothing_else_in_its_folder_changes(run_dir: Path, root: str, call: Call) -> None:
    before = snapshot(run_dir)
    said = call(run_dir, root, *QUICK)
    after = snapshot(run_dir)
    assert {name: data for name, data in after.items() if not name.startswith("explain/")} == before
    assert set(after) - set(before) == {f"explain/{FILE}", f"explain/{TRACE}"}
    step = json.loads(after[f"explain/{FILE}"])
    assert (step["title"], step["batch_size"], step["trace_steps"]) == ("cnn · rendered-digits", 16, 3)
    assert {"model.features.0", "model.classifier.1"} <= {row["module"] for row in step["modules"]}
    assert "costliest operations" in said.out


VERDICTS = {  # what the run's record says, another option → the kind and the evidence of these steps, which say compute
    "the same": ("compute", (), "compute", "compute"),
    "another one": (
        "host",
        (),
        "unclear",
        "these steps say arithmetic (99 % of the step), the run's record says Python and framework overhead (99 % of the step)",
    ),
    "another one with another option": ("host", ("data.batch_size=8",), "compute", "compute"),
    "none": ("unclear", (), "compute", "compute"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_that_contradicts_the_runs_record_is_unclear_and_both_are_said(
    name: str, run_dir: Path, root: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    old, options, kind, evidence = VERDICTS[name]
    new = {"kind": "compute", "share": 0.99, "certainty": "clear", "evidence": "compute", "busy": False}
    record = json.loads((run_dir / "run.json").read_text())
    record["throughput"]["bottleneck"] = new | {"kind": old}
    (run_dir / "run.json").write_text(json.dumps(record))
    step = replace(explanation(), device="cpu", device_name=record["hardware"]["device_name"], bottleneck=new)
    monkeypatch.setattr("batchscope.training.explain.explain", lambda *args: (step, {}))
    said = call(run_dir, root, *options).out
    found = json.loads((run_dir / "explain" / FILE).read_text())["bottleneck"]
    assert (found["kind"], found["evidence"]) == (kind, evidence)
    assert f"limit: {'unclear: ' if kind == 'unclear' else ''}{evidence}" in " ".join(said.split())


def test_options_change_what_is_explained(run_dir: Path, root: str, call: Call) -> None:
    found = json.loads(call(run_dir, root, "data.batch_size=8", *QUICK, "--json", "--out", run_dir.parent / "out").out)
    assert found["batch_size"] == 8
    assert found["folder"] == str(run_dir.parent / "out")
    assert (run_dir.parent / "out" / FILE).is_file()
    assert not (run_dir / "explain").exists()


def test_without_a_run_options_are_enough(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        "mlp · rendered-digits, batches of 16"
        in call("model=mlp", "data=digits", root, *SIZES, "trainer.accelerator=cpu", *QUICK).out
    )
    (folder,) = (tmp_path / "outputs" / "explain").iterdir()
    assert {path.name for path in folder.iterdir()} == {FILE, TRACE}
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


@pytest.mark.slow
def test_with_measured_peaks_the_table_has_lower_bounds(
    run_dir: Path, root: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr("batchscope.callbacks.profile.find_calibration", lambda device, measure: CPU)
    assert "bound/time" in call(run_dir, root, *QUICK).out


def test_a_read_only_disk_is_explained_in_print(
    run_dir: Path, root: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    def refuse(folder: Path, files: dict[str, bytes]) -> Path:
        raise OSError(30, "Read-only file system", str(folder))

    monkeypatch.setattr(explain, "write_folder", refuse)
    said = call(run_dir, root, *QUICK)
    assert "costliest operations" in said.out
    assert "trace.json.gz" not in said.out
    assert "cannot be written" in said.err


def test_a_place_that_only_the_command_line_decides_has_to_be_typed(run_dir: Path, root: str, refusal: Refusal) -> None:
    said = refusal(run_dir)
    assert said.startswith("data.root: is ")
    assert root in said


def test_what_is_no_run_is_answered_with_what_was_meant(run_dir: Path, tmp_path: Path, refusal: Refusal) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        tmp_path / "missing": "does not exist; write a run's folder, or options such as model=cnn data=mnist",
        empty: "holds no run (no run.json in it)",
        tmp_path: f"{tmp_path} holds 1 run; take one, such as {run_dir}",
        run_dir / "checkpoints" / "best.ckpt": "takes the folder of a run; write ",
    }
    for path, answer in cases.items():
        assert answer in refusal(path)


def test_last_is_the_newest_run(
    run_dir: Path, root: str, monkeypatch: pytest.MonkeyPatch, refusal: Refusal, call: Call
) -> None:
    monkeypatch.chdir(run_dir.parent)
    assert refusal("last") == "explain: got 'last', and there is no run in outputs/runs"
    shutil.move(run_dir, "outputs/runs/one")
    assert "explain  outputs/runs/one/explain/explain.json" in call("last", root, *QUICK).out


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("sent", "name", "where", "call"),
    [
        (interrupt, "SIGINT", "batchscope.training.task.Task.training_step", 8),  # in a traced step
        (terminate, "SIGTERM", "batchscope.files.write_bytes", 2),
    ],
)
def test_an_interruption_is_one_line_and_leaves_nothing(
    sent: Callable[[], None], name: str, where: str, call: int, tmp_path: Path
) -> None:
    words = ["model=mlp", "data=digits", "data.root=.", *SIZES, "trainer.accelerator=cpu", *QUICK, "--out", "here/out"]
    done = Run(tmp_path, *words, module="batchscope.cli.explain", faults=[(where, call, sent)])
    assert done.end() == 128 + getattr(signal, name)
    lines = [line for line in done.complained.splitlines() if line and "rendered" not in line]
    assert lines == [f"explain: stopped by {name}; nothing was written"]
    assert "a step takes" not in done.said
    assert not list(tmp_path.glob("here/*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("{", "run.json: cannot be read"),
        ({"config": None}, "holds no configuration"),
        ({"config": [1]}, "holds no configuration"),
        ({"config": {"model": {"_target_": "os.system"}}}, "is missing"),
    ],
    ids=str,
)
def test_a_record_without_a_configuration_is_refused(
    change: str | dict[str, Any], said: str, run_dir: Path, refusal: Refusal
) -> None:
    if isinstance(change, dict):
        record = json.loads((run_dir / "run.json").read_text()) | change
        change = json.dumps({key: value for key, value in record.items() if value is not None})
    (run_dir / "run.json").write_text(change)
    assert said in refusal(run_dir)


def test_a_link_out_of_the_runs_folder_is_refused(run_dir: Path, root: str, tmp_path: Path, refusal: Refusal) -> None:
    (run_dir / "explain").symlink_to(tmp_path)
    assert "is a link that leads out" in refusal(run_dir, root)


def test_a_step_that_fails_is_one_line(
    run_dir: Path, root: str, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise RuntimeError("shapes (3) and (4) differ\nat the second line")

    monkeypatch.setattr("batchscope.training.task.Task.training_step", fail)
    said = refusal(run_dir, root, *QUICK)
    assert said.endswith("a training step of cnn · rendered-digits fails: RuntimeError: shapes (3) and (4) differ")
    assert not (run_dir / "explain").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b"], "takes one run; got a and b"),
        (["--depth", "0", "model=cnn"], "argument --depth: takes a whole number from 1 to 1,000,000, got '0'"),
        (["--steps", "x", "model=cnn"], "argument --steps: takes a whole number from 1 to 1,000,000, got 'x'"),
        (["modle=cnn"], "modle: no such option"),
        (["model=cnnn"], "Did you mean 'cnn'?"),
        (["data.batch_size=0"], "data.batch_size"),
        (["data.batch_size=1,2"], "got several values"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_word_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refusal(*words)
    assert not list(tmp_path.iterdir())


def test_a_wrong_word_is_answered_without_torch(tmp_path: Path) -> None:
    program = "import sys; sys.argv[1:] = ['modle=cnn']; from batchscope.cli.explain import main\n"
    program += "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
