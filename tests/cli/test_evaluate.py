"""A checkpoint is evaluated by its path alone, and one that cannot be is refused in one line."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.cli import evaluate as command
from batchscope.cli.evaluate import evaluate
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.training.run import train
from tests.cli.support import exit_code
from tests.support.runs import run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short finished run on rendered digits."""
    folder = tmp_path_factory.mktemp("evaluate")
    sizes = "data.num_train=64 data.num_val=32 data.num_test=100 data.batch_size=16 trainer.max_epochs=1"
    quiet = "callbacks.progress=null callbacks.memory=null callbacks.throughput.calibrate=false"
    line = [*sizes.split(), *quiet.split(), "+callbacks.throughput.flops_per_sample=1", "trainer.accelerator=cpu"]
    line += ["data=digits", f"data.root={folder}", f"run_dir={folder / 'run'}"]
    config = check_command_line(line, multirun=False)[0]
    train(config, folder / "run", {"model": "cnn", "data": "digits"}, line)
    return folder / "run"


@pytest.fixture
def best(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "best.ckpt"


@pytest.fixture
def root(run_dir: Path) -> str:
    """The run's own `data.root=…`, which a checkpoint alone does not decide."""
    return f"data.root={run_dir.parent}"


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        evaluate(path, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is tested --------------------------------------------------------------------------------------------------


def test_the_test_metrics_of_the_run_come_back(best: Path, run_dir: Path, root: str) -> None:
    recorded = json.loads((run_dir / "run.json").read_text())["metrics"]
    name, metrics = evaluate(best, ["trainer.accelerator=cpu", root])
    assert name == "cnn-rendered-digits-bs16, tested on rendered-digits (100 samples)"
    assert metrics == pytest.approx({key: recorded[key] for key in ("test/loss", "test/acc")})


def test_options_that_change_no_metric_change_none(best: Path, root: str) -> None:
    ours = evaluate(best, [root])[1]
    words = ["data.batch_size=1000", "++trainer.inference_mode=false", "~trainer.num_sanity_val_steps"]
    assert evaluate(best, [root, *words])[1] == pytest.approx(ours, rel=1e-5)


def test_the_samples_are_those_that_were_tested(best: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchscope.data.base.MIN_EVAL_BATCH_SIZE", 30)
    name, _ = evaluate(best, ["+trainer.limit_test_batches=2", root])
    assert name.endswith("tested on rendered-digits (60 of 100 samples)")
    assert "limit_test_batches: got 0, which tests no batch" in refusal(best, "+trainer.limit_test_batches=0", root)


def test_a_run_folder_can_be_moved(run_dir: Path, tmp_path: Path, root: str) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(run_dir, moved)
    record = json.loads((moved / "run.json").read_text())
    assert evaluate(moved / record["checkpoints"]["last"], [root])[1]["test/acc"] >= 0


def test_the_program_prints_the_metrics_and_writes_nothing(best: Path, tmp_path: Path, root: str) -> None:
    done = run(tmp_path, f"ckpt={best}", "trainer.accelerator=cpu", root, module="batchscope.cli.evaluate")
    assert done.end() == 0, done.complained
    assert "tested on rendered-digits (100 samples)" in done.said
    assert "test/acc" in done.said
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("", 1, "ckpt: takes the path of one checkpoint: ckpt=outputs/runs/<run>/checkpoints/best.ckpt"),
        ("ckpt=", 1, "ckpt: takes the path of one checkpoint"),
        ("ckpt=x --multirun", 2, "unrecognized arguments: --multirun"),
        ("cpkt=x", 1, "cpkt: no such option. Did you mean 'ckpt'?"),
        ("ckpt_path=some/best.ckpt", 1, "ckpt_path: is called ckpt here; write ckpt=some/best.ckpt"),
    ],
)
def test_a_wrong_command_line_is_one_line(line: str, code: int, said: str, monkeypatch: Any, capsys: Any) -> None:
    assert exit_code(command, monkeypatch, *line.split()) == code
    complained = capsys.readouterr().err
    assert complained.startswith(f"error: {said}") and complained.count("\n") == 1


def test_a_missing_checkpoint_is_refused_with_those_that_are_there(best: Path, run_dir: Path, tmp_path: Path) -> None:
    assert "is not a file; in that folder: best.ckpt, last.ckpt" in refusal(best.with_name("bset.ckpt"))
    assert refusal(run_dir) == f"ckpt: got '{run_dir}', which is not a file; write ckpt={best}"
    assert "is not a file" in refusal(tmp_path)
    (tmp_path / "last.ckpt").touch()
    assert refusal(tmp_path).endswith(f"write ckpt={tmp_path / 'last.ckpt'}")


def test_a_folder_without_ckpt_is_answered_with_a_line_that_works(
    best: Path, run_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for given, said in (
        (run_dir, f"; write ckpt={best}"),
        (tmp_path, ": ckpt=outputs/runs/<run>/checkpoints/best.ckpt"),
    ):
        assert exit_code(command, monkeypatch, str(given)) == 1
        assert capsys.readouterr().err == f"error: ckpt: takes the path of one checkpoint{said}\n"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("model=mlp", "holds the weights of cnn-rendered-digits-bs16, which do not fit MLP"),
        ("model.hidden_size=7", "size mismatch"),
        ("data=adding", "SimpleCNN reads image data"),
        ("data.rot=x", "Did you mean 'root'?"),
        ("compile=true", "compile: only training steps are compiled"),
    ],
)
def test_options_that_do_not_fit_are_refused(overrides: str, said: str, best: Path, root: str) -> None:
    assert said in refusal(best, root, *overrides.split())


def test_a_wrong_value_is_refused_before_data_are_made(best: Path, tmp_path: Path) -> None:
    message = refusal(best, f"data.root={tmp_path / 'data'}", "trainer.strategy=foo")
    assert message.startswith("trainer: ")
    assert not (tmp_path / "data").exists()


# --- files that are no checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, -1000])
def test_a_truncated_checkpoint_is_refused(best: Path, tmp_path: Path, size: int) -> None:
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(best.read_bytes()[:size])
    assert f"ckpt: {torn} is not a whole checkpoint" in refusal(torn)


def test_somebody_elses_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    path.write_text("not a checkpoint")
    assert "is not a whole checkpoint" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")
    assert str(path) in refusal(path)
    torch.save({"state_dict": {}}, path)
    assert "is not a checkpoint that batchscope wrote" in refusal(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    hostile = tmp_path / "hostile.ckpt"
    torch.save({"state_dict": Payload(), "batchscope": {}}, hostile, pickle_module=pickle)
    assert "holds more than tensors and plain values and was not loaded" in refusal(hostile)
    assert not (tmp_path / "ran").exists()


def test_a_class_named_in_a_checkpoint_is_built_only_if_it_is_allowed(best: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(best, weights_only=True)
    checkpoint["batchscope"]["config"]["model"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'ran'}"}
    torch.save(checkpoint, tmp_path / "hostile.ckpt")
    assert "model._target_: is 'os.system' in" in refusal(tmp_path / "hostile.ckpt")
    assert not (tmp_path / "ran").exists()
