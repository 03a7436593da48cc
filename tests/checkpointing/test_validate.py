"""A checkpoint that does not fit its run is found before anything is restored."""

from collections.abc import Callable
from pathlib import Path

import lightning
import pytest
import torch

from batchscope.checkpointing.checkpoint_file import load_checkpoint
from batchscope.checkpointing.validate import check_resumable
from batchscope.errors import UserError
from batchscope.training.build import build, build_callbacks
from batchscope.training.task import Task
from tests.checkpointing.support import change, of_another_model
from tests.support.runs import record


def _without_a_parameters_state(checkpoint: dict) -> None:
    checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()


def _with_a_state_of_another_shape(checkpoint: dict) -> None:
    checkpoint["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3)


def _without_a_schedule(checkpoint: dict) -> None:
    checkpoint["lr_schedulers"] = []


def _with_a_strange_schedule(checkpoint: dict) -> None:
    checkpoint["lr_schedulers"][0]["last_epoch"] = "soon"


def _with_a_negative_counter(checkpoint: dict) -> None:
    checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] = -5


def _with_other_batches(checkpoint: dict) -> None:
    checkpoint["loop_state"]["batches"] += 1


def _with_a_strange_callback(checkpoint: dict) -> None:
    checkpoint["callbacks"]["Checkpoints"] = {"best": [], "metrics": {}}


def _with_a_strange_gradient(checkpoint: dict) -> None:
    checkpoint["loop_state"]["gradients"] = {"model.head.bias": torch.zeros(7)}


def _with_a_huge_count(checkpoint: dict) -> None:
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
    progress["optimizer"]["step"]["total"]["completed"] = 2**63


def _with_another_epoch(checkpoint: dict) -> None:
    checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] = 5


def _with_a_metric_that_commands_the_terminal(checkpoint: dict) -> None:
    checkpoint["callbacks"]["Checkpoints"]["metrics"]["test/\x1b]0;x"] = 1.0


def _with_a_metric_that_no_float_holds(checkpoint: dict) -> None:
    checkpoint["callbacks"]["Checkpoints"]["metrics"]["val/loss"] = 10**400


def _with_complex_weights(checkpoint: dict) -> None:
    checkpoint["state_dict"]["model.head.bias"] = checkpoint["state_dict"]["model.head.bias"].to(torch.complex64)


def _with_a_sparse_gradient(checkpoint: dict) -> None:
    sparse = checkpoint["state_dict"]["model.head.bias"].to_sparse()
    checkpoint["loop_state"]["gradients"] = {"model.head.bias": sparse}


def _with_a_sparse_state(checkpoint: dict) -> None:
    state = checkpoint["optimizer_states"][0]["state"][0]
    state["exp_avg"] = state["exp_avg"].to_sparse()


@pytest.fixture(scope="module")
def fresh(interrupted: Path) -> tuple[lightning.Trainer, Task]:
    """The trainer and the task of the run, not yet used."""
    config = record(interrupted / "out")["config"]
    data = build(config["data"], "data")
    task = Task(build(config["model"], "model", spec=data.spec), data.spec, build(config["optimizer"], "optimizer"))
    callbacks, flags = build_callbacks(config)
    return build(config["trainer"], "trainer", callbacks=callbacks, logger=False, **flags), task


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (of_another_model, "its weights are of another model: model.head.bias is (7,) there and (9,) here"),
        (_without_a_parameters_state, "optimizer_states are of another optimizer: "),
        (_with_a_state_of_another_shape, "optimizer_states are of another model"),
        (_without_a_schedule, "optimizer_states has 1 entries, and lr_schedulers 0"),
        (_with_a_strange_schedule, "lr_schedulers.0.last_epoch is 'soon', not a count"),
        (_with_a_negative_counter, "loops.fit_loop.epoch_loop.batch_progress.total.ready is -5, not a count"),
        (_with_other_batches, "loops.fit_loop and loop_state do not agree on the batches of the epoch"),
        (_with_a_strange_callback, "callbacks.Checkpoints.best is [], not a number"),
        (_with_a_strange_gradient, "loop_state.gradients.model.head.bias is no gradient of the model's"),
        (_with_a_huge_count, "loops.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total."),
        (_with_another_epoch, "loops.fit_loop and loop_state do not agree on the epoch"),
        (_with_a_metric_that_commands_the_terminal, "callbacks.Checkpoints.metrics has 'test/\\x1b]0;x'"),
        (_with_a_metric_that_no_float_holds, "callbacks.Checkpoints.metrics.val/loss is 1000"),
        (_with_complex_weights, "its weights are of another model: model.head.bias is of torch.complex64"),
        (_with_a_sparse_gradient, "loop_state.gradients.model.head.bias is no gradient of the model's"),
        (_with_a_sparse_state, "optimizer_states are of another model"),
    ],
)
def test_what_does_not_fit_the_run_is_found_before_anything_is_restored(
    how: Callable[[dict], None], said: str, killed: Path, fresh: tuple[lightning.Trainer, Task]
) -> None:
    path = killed / "out" / "checkpoints" / "last.ckpt"
    check_resumable(load_checkpoint(path), path, *fresh)
    change(path, how)
    with pytest.raises(UserError) as caught:
        check_resumable(load_checkpoint(path), path, *fresh)
    assert f"{path} cannot be resumed from: {said}" in str(caught.value)
