"""The YAML recipes: early stopping, weight averaging, the search for a learning rate, and the overlay to debug with."""

from pathlib import Path

import pytest
import torch

from batchscope.errors import UserError
from batchscope.options.compose import check_command_line, compose_command_line
from batchscope.options.groups import choices_of
from tests.support.runs import EVERY_4, SMALL, assert_alike, kill_9, last, record, results, run

OUT = "hydra.run.dir=out"
STEP = "batchscope.training.task.Task.training_step"
# The validation gets worse from the first epoch on.
STOPS = ["callbacks=early_stopping", "callbacks.early_stopping.patience=2", "optimizer.lr=0.3", "trainer.max_epochs=20"]
AVERAGES = ["callbacks=weight_averaging", "callbacks.weight_averaging.decay=0.5"]


def composed(*words: str) -> dict:
    return check_command_line(list(words), multirun=False)[0]


@pytest.mark.parametrize("choice", ["early_stopping", "weight_averaging", "[early_stopping,weight_averaging]"])
def test_a_recipe_adds_to_the_callbacks_that_every_run_has(choice: str) -> None:
    found = set(composed(f"callbacks={choice}")["callbacks"])
    assert found == set(composed()["callbacks"]) | set(choice.strip("[]").split(","))


def test_early_stopping_ends_after_the_same_epoch_when_it_is_resumed(tmp_path: Path) -> None:
    words = [*SMALL, *STOPS, "optimizer.schedule=constant", EVERY_4, OUT]
    whole = run(tmp_path / "whole", *words)
    assert whole.end() == 0, whole.complained
    epochs = record(tmp_path / "whole" / "out")["epochs"]
    assert 3 <= epochs < 20
    at = 10 * (epochs - 1) + 5  # in the last epoch
    assert run(tmp_path / "killed", *words, faults=[(STEP, at, kill_9)]).end() == -9
    done = run(tmp_path / "killed", "resume=out")
    assert done.end() == 0, done.complained
    assert_alike(results(tmp_path / "killed" / "out"), results(tmp_path / "whole" / "out"))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averaged")
    done = run(folder, *SMALL, *AVERAGES, EVERY_4, OUT)
    assert done.end() == 0, done.complained
    assert "warning" not in done.complained.lower()
    return folder / "out"


def test_the_best_checkpoint_holds_the_averaged_weights_that_are_tested(averaged: Path) -> None:
    best = torch.load(averaged / "checkpoints" / "best.ckpt", weights_only=True)
    assert not all(torch.equal(best["state_dict"][name], own) for name, own in best["current_model_state"].items())
    done = run(averaged.parent / "again", f"ckpt={averaged}/checkpoints/best.ckpt", module="batchscope.evaluate")
    assert done.end() == 0, done.complained
    tested = {key: float(value) for key, value in (w.split() for w in done.said.splitlines() if w.startswith("test/"))}
    assert tested == {k: pytest.approx(v, abs=1e-6) for k, v in record(averaged)["metrics"].items() if "test" in k}


@pytest.mark.parametrize("at", [pytest.param(8, marks=pytest.mark.slow), 15])
def test_averaging_is_resumed_bit_for_bit(averaged: Path, tmp_path: Path, at: int) -> None:
    assert run(tmp_path, *SMALL, *AVERAGES, EVERY_4, OUT, faults=[(STEP, at, kill_9)]).end() == -9
    done = run(tmp_path, "resume=out")
    assert done.end() == 0, done.complained
    assert_alike(results(tmp_path / "out"), results(averaged))
    assert_alike(last(tmp_path / "out")["current_model_state"], last(averaged)["current_model_state"])


def test_averaging_a_sharded_model_is_refused() -> None:
    with pytest.raises(UserError, match="^callbacks.weight_averaging: keeps a whole copy of the weights"):
        composed("callbacks=weight_averaging", "trainer=fsdp")


def test_find_lr_is_a_sweep_over_rates_that_another_range_replaces() -> None:
    assert len(compose_command_line(["experiment=find_lr"], multirun=True).configs) == 6
    line = compose_command_line(["experiment=find_lr", "optimizer.lr=0.1,0.2"], multirun=True)
    assert [config["optimizer"]["lr"] for config in line.configs] == [0.1, 0.2]


@pytest.mark.parametrize("model", choices_of("model"))
def test_debug_goes_with_every_model(model: str) -> None:
    config = composed("debug=default", f"model={model}", "compile=true")
    assert (config["trainer"]["max_epochs"], config["trainer"]["detect_anomaly"]) == (1, True)


def test_debug_runs_a_few_batches(tmp_path: Path) -> None:
    words = [word for word in SMALL if "max_epochs" not in word]
    done = run(tmp_path, *words, "debug=default", OUT)
    assert done.end() == 0, done.complained
    assert record(tmp_path / "out")["steps"] == 5


def test_debug_shows_the_traceback_of_an_error_that_is_one_line_otherwise(tmp_path: Path) -> None:
    from tests.training.test_failures import break_one_loss

    words = [*SMALL, OUT]
    for name, debug in (("plain", []), ("debug", ["debug=default"])):
        done = run(tmp_path / name, *words, *debug, faults=[(STEP, 3, break_one_loss)])
        assert done.end() == 1
        assert ("Traceback" in done.complained) == bool(debug), done.complained
