"""A checkpoint is evaluated and exported by its path alone, and one that cannot be is refused in one line."""

import shutil

import pytest

from batchscope.cli import evaluate as program
from batchscope.cli.evaluate import evaluate
from tests.support.command_lines import answer, refusal
from tests.support.runs import record

NAME = "cnn-rendered-digits-bs16"


@pytest.fixture
def best(finished):
    return finished / "checkpoints" / "best.ckpt"


def test_the_test_metrics_of_the_run_are_printed_and_nothing_is_written(best, finished, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metrics = record(finished)["metrics"]
    result = answer("evaluate", f"ckpt={best}", "trainer.accelerator=cpu", root)
    lines = [f"{NAME}, tested on rendered-digits"]
    lines += [f"{key:12} {metrics[key]:.6g}" for key in ("test/acc", "test/loss")]
    assert (result.code, result.out.splitlines()[-3:]) == (0, lines)
    assert not [*tmp_path.iterdir()]


def test_a_small_metric_keeps_its_digits(best, monkeypatch):
    monkeypatch.setattr(program, "evaluate", lambda path, overrides: ("cnn", {"test/loss": 3.21e-7}))
    assert answer("evaluate", f"ckpt={best}").out == "cnn\ntest/loss    3.21e-07\n"


def test_options_that_change_no_metric_change_none_also_in_a_folder_that_was_moved(finished, root, tmp_path):
    moved = shutil.copytree(finished, tmp_path / "elsewhere")
    path = moved / record(moved)["checkpoints"]["last"]
    words = ["data.batch_size=1000", "++trainer.inference_mode=false", "~trainer.num_sanity_val_steps"]
    words.append(f"optimizer._target_={record(finished)['config']['optimizer']['_target_']}")  # confirms the class
    assert evaluate(path, [root, *words])[1] == pytest.approx(evaluate(path, [root])[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("model=mlp", f"holds the weights of {NAME}, which do not fit MLP"),
        ("model.hidden_size=7", "size mismatch"),
        ("data=sequential_mnist", "SimpleCNN reads image data"),
        ("data.rot=x", "Did you mean 'root'?"),
        ("model.width=16", "model.width: no such option. model takes channels, hidden_size, "),
        ("data=nan", "data: got 'nan', takes adding"),
        ("compile=true", "compile: only training steps are compiled"),
        ("optimizer.lr=1", "optimizer.lr: has no effect on an evaluation, which reads no optimizer"),
        ("optimizer=sgd", "optimizer: has no effect on an evaluation, which reads no optimizer"),
        ("callbacks.progress=null", "callbacks.progress: has no effect on an evaluation, which reads no callbacks"),
        ("logger=none", "logger: has no effect on an evaluation, which reads no logger"),
        ("tags=[again]", "tags: has no effect on an evaluation"),
        ("+trainer.limit_test_batches=0", "limit_test_batches: got 0, which tests no batch"),
        ("data.root=nowhere trainer.strategy=foo", "trainer: "),  # before data are made
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, best, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(evaluate, best, [root, *options.split()])
    assert not [*tmp_path.iterdir()]


def test_a_network_is_exported_with_one_line(best, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = answer("export", f"ckpt={best}", "format=torch_export", root)
    assert result.code == 0, result.err
    assert result.out.startswith(f"{NAME} → model.pt2: differs from the network by at most ")
