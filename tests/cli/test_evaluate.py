"""A checkpoint is evaluated by its path alone, and one that cannot be is refused in one line."""

import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from batchscope.cli.evaluate import _main, evaluate
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.training.run import train
from tests.support.runs import run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short finished run on rendered digits."""
    folder = tmp_path_factory.mktemp("evaluate")
    sizes = ["data.num_train=64", "data.num_val=32", "data.num_test=100", "data.batch_size=16"]
    line = ["data=digits", f"data.root={folder}", *sizes, "trainer.max_epochs=1", "callbacks.progress=null"]
    line += [
        "callbacks.throughput.calibrate=false",
        "+callbacks.throughput.flops_per_sample=1",
        "callbacks.memory=null",
    ]
    line += ["trainer.accelerator=cpu", f"run_dir={folder / 'run'}"]
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


def test_the_test_metrics_of_the_run_come_back(best: Path, run_dir: Path, root: str) -> None:
    recorded = json.loads((run_dir / "run.json").read_text())["metrics"]
    name, metrics = evaluate(best, ["trainer.accelerator=cpu", root])
    assert name == "cnn-rendered-digits-bs16, tested on rendered-digits (100 samples)"
    assert metrics == pytest.approx({key: recorded[key] for key in ("test/loss", "test/acc")})


def test_the_batch_size_changes_nothing_but_the_speed(best: Path, root: str) -> None:
    ours = evaluate(best, [root])[1]
    others = evaluate(best, ["data.batch_size=1000", root])[1]
    assert others == pytest.approx(ours, rel=1e-5)


def test_the_program_prints_the_metrics(best: Path, tmp_path: Path, root: str) -> None:
    done = run(tmp_path, f"ckpt={best}", "trainer.accelerator=cpu", root, module="batchscope.evaluate")
    assert done.end() == 0, done.complained
    assert "tested on rendered-digits (100 samples)" in done.said
    assert "test/acc" in done.said
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        evaluate(path, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_checkpoint_is_refused_with_those_that_are_there(best: Path) -> None:
    message = refusal(best.with_name("bset.ckpt"))
    assert "is not a file; in that folder: best.ckpt, last.ckpt" in message


def test_a_runs_folder_is_answered_with_its_best_checkpoint(best: Path, run_dir: Path) -> None:
    assert refusal(run_dir) == f"ckpt: got '{run_dir}', which is not a file; write ckpt={best}"


@pytest.mark.parametrize("size", [0, 1, 1000, -1000])
def test_a_truncated_checkpoint_is_refused(best: Path, tmp_path: Path, size: int) -> None:
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(best.read_bytes()[:size])
    assert f"ckpt: {torn} is not a whole checkpoint" in refusal(torn)


def test_a_folder_or_another_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a checkpoint")
    assert "is not a whole checkpoint" in refusal(other)
    assert "is not a file" in refusal(tmp_path)


def test_weights_of_another_model_are_refused(best: Path, root: str) -> None:
    assert "holds the weights of cnn-rendered-digits-bs16, which do not fit MLP" in refusal(best, "model=mlp", root)
    assert "size mismatch" in refusal(best, "model.hidden_size=7", root)


def test_data_that_the_model_cannot_read_is_refused(best: Path) -> None:
    assert "SimpleCNN reads image data" in refusal(best, "data=adding")


def test_an_option_that_the_checkpoint_lacks_is_added_with_a_plus(best: Path, root: str) -> None:
    evaluate(
        best, [root, "+trainer.limit_test_batches=2", "++trainer.inference_mode=false", "~trainer.num_sanity_val_steps"]
    )


def test_a_wrong_value_is_refused_before_data_are_made(best: Path, tmp_path: Path) -> None:
    message = refusal(best, f"data.root={tmp_path / 'data'}", "trainer.strategy=foo")
    assert message.startswith("trainer: ")
    assert not (tmp_path / "data").exists()


def test_a_flag_that_there_is_not_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "ckpt=x", "--multirun", module="batchscope.evaluate")
    assert done.end() == 2
    assert done.complained == "error: unrecognized arguments: --multirun\n"


def test_an_unknown_option_is_refused(best: Path) -> None:
    assert "Did you mean 'root'?" in refusal(best, "data.rot=x")


def test_somebody_elses_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save({"state_dict": {}}, path)
    assert "is not a checkpoint that batchscope wrote" in refusal(path)


def test_code_in_a_checkpoint_is_not_run(best: Path, tmp_path: Path) -> None:
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


def test_a_zip_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")
    assert str(path) in refusal(path)


def test_the_samples_are_those_that_were_tested(best: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchscope.data.base.MIN_EVAL_BATCH_SIZE", 30)
    name, _ = evaluate(best, ["+trainer.limit_test_batches=2", root])
    assert name.endswith("tested on rendered-digits (60 of 100 samples)")
    with pytest.raises(UserError, match=r"trainer\.limit_test_batches: got 0, which tests no batch"):
        evaluate(best, ["+trainer.limit_test_batches=0", root])


@pytest.mark.parametrize("word", ["cpkt", "ckp", "chkpt"])
def test_a_misspelled_ckpt_is_recognized(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate", f"{word}=x", "trainer.accelerator=cpu"])
    with pytest.raises(UserError) as error:
        _main()
    assert str(error.value) == f"{word}: no such option. Did you mean 'ckpt'?"


def test_without_a_path_the_program_says_what_it_takes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchscope.evaluate"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ckpt: takes the path of one checkpoint")


def test_a_run_folder_can_be_moved(run_dir: Path, tmp_path: Path, root: str) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(run_dir, moved)
    record = json.loads((moved / "run.json").read_text())
    assert evaluate(moved / record["checkpoints"]["last"], [root])[1]["test/acc"] >= 0


def test_the_word_of_other_templates_is_answered_with_the_one_to_write(tmp_path: Path) -> None:
    done = run(tmp_path, "ckpt_path=some/best.ckpt", module="batchscope.evaluate")
    assert done.end() == 1
    assert done.complained == "error: ckpt_path: is called ckpt here; write ckpt=some/best.ckpt\n"
