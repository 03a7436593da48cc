"""The YAML recipes: early stopping, weight averaging, the search for a learning rate, and the overlay to debug with.

That they are resumed bit for bit stands in the table of tests/checkpointing/test_exact_resume.py.
"""

from pathlib import Path

import pytest
import torch

from batchscope.cli.evaluate import evaluate
from batchscope.options.compose import compose_command_line
from tests.checkpointing.support import OUT, STEP
from tests.checkpointing.test_exact_resume import AVERAGES, STOPS
from tests.support.command_lines import composed
from tests.support.runs import EVERY_4, SMALL, record, run
from tests.training.test_failures import break_one_loss


@pytest.mark.parametrize("choice", ["early_stopping", "weight_averaging", "[early_stopping,weight_averaging]"])
def test_a_recipe_adds_to_the_callbacks_that_every_run_has(choice: str) -> None:
    found = set(composed(f"callbacks={choice}")["callbacks"])
    assert found == set(composed()["callbacks"]) | set(choice.strip("[]").split(","))


def test_the_best_checkpoint_holds_the_averaged_weights_that_are_tested(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, *AVERAGES, EVERY_4, OUT)
    assert done.end() == 0, done.complained
    assert "warning" not in done.complained.lower()
    best = torch.load(tmp_path / "out/checkpoints/best.ckpt", weights_only=True)
    assert not all(torch.equal(best["state_dict"][name], own) for name, own in best["current_model_state"].items())
    _, tested = evaluate(tmp_path / "out/checkpoints/best.ckpt", ["trainer.accelerator=cpu"])
    metrics = record(tmp_path / "out")["metrics"]
    assert tested == {key: pytest.approx(metrics[key], abs=1e-6) for key in metrics if key.startswith("test/")}


def test_early_stopping_ends_a_run_whose_validation_gets_worse(tmp_path: Path) -> None:
    assert run(tmp_path, *SMALL, *STOPS, OUT).end() == 0
    assert 3 <= record(tmp_path / "out")["epochs"] < 20


def test_find_lr_is_a_sweep_over_rates_that_another_range_replaces() -> None:
    assert len(compose_command_line(["experiment=find_lr"], multirun=True).configs) == 6
    line = compose_command_line(["experiment=find_lr", "optimizer.lr=0.1,0.2"], multirun=True)
    assert [config["optimizer"]["lr"] for config in line.configs] == [0.1, 0.2]


def test_debug_is_short_and_shows_the_first_wrong_number_and_the_traceback(tmp_path: Path) -> None:
    trainer = composed("debug=default", "compile=true")["trainer"]
    assert (trainer["max_epochs"], trainer["limit_train_batches"], trainer["detect_anomaly"]) == (1, 5, True)
    done = run(tmp_path, *SMALL, OUT, "debug=default", faults=[(STEP, 3, break_one_loss)])
    assert done.end() == 1
    assert "Traceback" in done.complained  # of an error that is one line otherwise
