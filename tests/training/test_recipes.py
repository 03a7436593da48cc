"""The YAML recipes: early stopping, weight averaging, the search for a learning rate, and the overlay to debug with.

That they are resumed bit for bit stands in the table of tests/checkpointing/test_exact_resume.py.
"""

from pathlib import Path

import pytest
import torch

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
    done = run(averaged.parent / "again", f"ckpt={averaged}/checkpoints/best.ckpt", module="batchscope.cli.evaluate")
    assert done.end() == 0, done.complained
    tested = {key: float(value) for key, value in (w.split() for w in done.said.splitlines() if w.startswith("test/"))}
    assert tested == {k: pytest.approx(v, abs=1e-6) for k, v in record(averaged)["metrics"].items() if "test" in k}


def test_early_stopping_ends_a_run_whose_validation_gets_worse(tmp_path: Path) -> None:
    assert run(tmp_path, *SMALL, *STOPS, OUT).end() == 0
    assert 3 <= record(tmp_path / "out")["epochs"] < 20


def test_find_lr_is_a_sweep_over_rates_that_another_range_replaces() -> None:
    assert len(compose_command_line(["experiment=find_lr"], multirun=True).configs) == 6
    line = compose_command_line(["experiment=find_lr", "optimizer.lr=0.1,0.2"], multirun=True)
    assert [config["optimizer"]["lr"] for config in line.configs] == [0.1, 0.2]


def test_debug_is_short_and_looks_for_the_first_wrong_number() -> None:
    config = composed("debug=default", "compile=true")
    assert (config["trainer"]["max_epochs"], config["trainer"]["detect_anomaly"]) == (1, True)


def test_debug_runs_a_few_batches(tmp_path: Path) -> None:
    words = [word for word in SMALL if "max_epochs" not in word]
    done = run(tmp_path, *words, "debug=default", OUT)
    assert done.end() == 0, done.complained
    assert record(tmp_path / "out")["steps"] == 5


def test_debug_shows_the_traceback_of_an_error_that_is_one_line_otherwise(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, OUT, "debug=default", faults=[(STEP, 3, break_one_loss)])
    assert done.end() == 1
    assert "Traceback" in done.complained
