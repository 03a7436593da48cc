"""A checkpoint is evaluated by its path alone, and one that cannot be is refused in one line."""

import json
import shutil
from pathlib import Path

import pytest

from batchscope.cli.evaluate import evaluate
from tests.support.command_lines import answer, refusal
from tests.support.runs import run


@pytest.fixture
def best(finished: Path) -> Path:
    return finished / "checkpoints" / "best.ckpt"


def test_the_test_metrics_of_the_run_come_back(best: Path, finished: Path, root: str) -> None:
    recorded = json.loads((finished / "run.json").read_text())["metrics"]
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
    none = refusal(evaluate, best, ["+trainer.limit_test_batches=0", root])
    assert "limit_test_batches: got 0, which tests no batch" in none


def test_a_run_folder_can_be_moved(finished: Path, tmp_path: Path, root: str) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished, moved)
    record = json.loads((moved / "run.json").read_text())
    assert evaluate(moved / record["checkpoints"]["last"], [root])[1]["test/acc"] >= 0


def test_the_program_prints_the_metrics_and_writes_nothing(best: Path, tmp_path: Path, root: str) -> None:
    done = run(tmp_path, f"ckpt={best}", "trainer.accelerator=cpu", root, module="batchscope.cli.evaluate")
    assert done.end() == 0, done.complained
    assert "tested on rendered-digits (100 samples)" in done.said
    assert "test/acc" in done.said
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "latency"])
def test_every_command_answers_a_folder_with_the_checkpoint_in_it(command: str, best: Path, finished: Path) -> None:
    more = ["input=test"] if command == "predict" else []
    found = answer(command, f"ckpt={finished}", *more)
    assert found.code == 1
    assert f"ckpt: got '{finished}', which is not a file; write ckpt={best}\n" in found.err


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("state_dict", "cnn-rendered-digits-bs16 → model.pt\n"),
        ("torch_export", "cnn-rendered-digits-bs16 → model.pt2: differs from the network by at most "),
    ],
)
def test_a_network_is_exported_with_one_line(
    form: str, said: str, best: Path, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = answer("export", f"ckpt={best}", f"format={form}", root)
    assert found.code == 0, found.err
    assert found.out.startswith(said)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("model=mlp", "holds the weights of cnn-rendered-digits-bs16, which do not fit MLP"),
        ("model.hidden_size=7", "size mismatch"),
        ("data=sequential_mnist", "SimpleCNN reads image data"),
        ("data.rot=x", "Did you mean 'root'?"),
        ("compile=true", "compile: only training steps are compiled"),
    ],
)
def test_options_that_do_not_fit_are_refused(overrides: str, said: str, best: Path, root: str) -> None:
    assert said in refusal(evaluate, best, [root, *overrides.split()])


def test_a_wrong_value_is_refused_before_data_are_made(best: Path, tmp_path: Path) -> None:
    message = refusal(evaluate, best, [f"data.root={tmp_path / 'data'}", "trainer.strategy=foo"])
    assert message.startswith("trainer: ")
    assert not (tmp_path / "data").exists()
