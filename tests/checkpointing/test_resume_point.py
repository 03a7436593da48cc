"""A run is resumed from its last valid checkpoint, and a resume that is refused changes nothing."""

import os
import shutil
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch

from batchscope.checkpointing.checkpoint_file import load_checkpoint
from batchscope.checkpointing.resume_point import find_resume_point
from batchscope.checkpointing.validate import check_resumable
from batchscope.errors import UserError
from batchscope.training.build import build, build_optimizer
from batchscope.training.task import Task
from tests.checkpointing.support import OUT, STEP, change, flip_a_bit, of_another_model, refuses
from tests.support.runs import EVERY_4, SMALL, curves, kill_9, record, run


def checkpoints(folder: Path) -> Path:
    return folder / "out" / "checkpoints"


def test_a_checkpoint_that_is_the_last_and_the_best_one_is_read_once(killed: Path, monkeypatch) -> None:
    (checkpoints(killed) / "best.ckpt").unlink()
    os.link(checkpoints(killed) / "last.ckpt", checkpoints(killed) / "best.ckpt")
    flip_a_bit(checkpoints(killed) / "last.ckpt")
    read: list[Path] = []
    loaded = "batchscope.checkpointing.resume_point.load_checkpoint"
    monkeypatch.setattr(loaded, lambda path: (read.append(path), load_checkpoint(path))[1])
    with pytest.raises(UserError, match="^resume: no checkpoint is valid, and nothing was changed: "):
        find_resume_point(checkpoints(killed))
    assert read == [checkpoints(killed) / "last.ckpt"]


@pytest.mark.slow
def test_without_its_best_checkpoint_a_run_keeps_the_best_of_what_follows(killed: Path) -> None:
    (checkpoints(killed) / "best.ckpt").unlink()
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    assert record(killed / "out")["checkpoints"]["best"] == "checkpoints/best.ckpt"


def damage_both(folder: Path) -> None:
    flip_a_bit(checkpoints(folder) / "last.ckpt")
    (checkpoints(folder) / "best.ckpt").write_bytes(b"")


def remove_all(folder: Path) -> None:
    for path in checkpoints(folder).iterdir():
        path.unlink()


def replace_folder(folder: Path) -> None:
    shutil.rmtree(checkpoints(folder))
    checkpoints(folder).write_text("")


def other_data() -> None:
    """The options are the same, and the dataset has changed."""
    from batchscope.data.copy_memory import CopyMemory

    CopyMemory.fingerprint = "0123456789abcdef"


GONE = "resume: the run has written checkpoints/last.ckpt, and it is gone; put it back, or start another run"
REFUSALS = {
    "resume: no checkpoint is valid, and nothing was changed: out/checkpoints/last.ckpt is damaged: ": damage_both,
    GONE: remove_all,
    f"{GONE} ": lambda folder: checkpoints(folder).rename(folder / "unmounted"),
    "resume: out/checkpoints cannot be read, and nothing was changed: Not a directory": replace_folder,
    "resume: the data have changed: their fingerprint is 0123456789abcdef, and was ": (
        *("batchscope.data.datamodule.TensorDataModule.setup", 1),
        other_data,
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSALS)
def test_a_run_that_cannot_continue_is_one_line_and_nothing_is_trained_or_changed(said: str, killed: Path) -> None:
    how = REFUSALS[said]
    faults = [how] if isinstance(how, tuple) else how(killed) and []
    refuses(killed, said.rstrip(), faults=faults)


def test_a_finished_run_is_not_made_shorter_and_stays_as_it_was(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, OUT, "optimizer.schedule=constant")
    assert done.end() == 0, done.complained
    for refused in ("trainer.max_epochs=1", "trainer.max_steps=15"):
        refuses(tmp_path, refused.replace("=", ": got "), refused)


def test_the_best_checkpoint_of_a_run_that_is_made_longer_stays_in_its_record(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, OUT, "optimizer.schedule=constant")
    assert done.end() == 0, done.complained
    assert run(tmp_path, "resume=out", "trainer.max_epochs=3", faults=[(STEP, 6, kill_9)]).end() == -9
    kept = {kind: f"checkpoints/{kind}.ckpt" for kind in ("best", "last")}
    assert record(tmp_path / "out")["checkpoints"] == kept


@pytest.mark.slow
def test_checkpoints_may_lie_elsewhere(tmp_path: Path, unstopped: Path) -> None:
    elsewhere = f"callbacks.checkpoint.dirpath={tmp_path / 'scratch'}"
    assert run(tmp_path, *SMALL, EVERY_4, OUT, elsewhere, faults=[(STEP, 10, kill_9)]).end() == -9
    shutil.move(tmp_path / "out", tmp_path / "moved")
    done = run(tmp_path / "from", "resume=../moved", elsewhere)
    assert done.end() == 0, done.complained
    shutil.move(tmp_path / "moved", tmp_path / "out")
    assert [entry["step"] for entry in record(tmp_path / "out")["resumed"]] == [8]
    assert curves(tmp_path / "out") == curves(unstopped)


@pytest.mark.slow
def test_checkpoints_of_another_run_in_the_same_place_are_refused(tmp_path: Path) -> None:
    elsewhere = f"callbacks.checkpoint.dirpath={tmp_path / 'scratch'}"
    for folder in (OUT, "hydra.run.dir=theirs"):
        assert run(tmp_path, *SMALL, EVERY_4, folder, elsewhere, faults=[(STEP, 10, kill_9)]).end() == -9
    refuses(tmp_path, "resume: no checkpoint is valid, and nothing was changed: ", elsewhere)


# --- a checkpoint whose bytes are intact ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(interrupted: Path) -> Task:
    """The task of the run, not yet used."""
    config = record(interrupted / "out")["config"]
    data = build(config["data"], "data")
    return Task(build(config["model"], "model", spec=data.spec), data.spec, build_optimizer(config["optimizer"]))


def setting(value: object, *path: str | int) -> Callable[[dict], None]:
    """Change the value at a path."""
    return lambda checkpoint: reduce(getitem, path[:-1], checkpoint).__setitem__(path[-1], value)


def without(*path: str | int) -> Callable[[dict], None]:
    """Remove the entry at a path."""
    return lambda checkpoint: reduce(getitem, path[:-1], checkpoint).__delitem__(path[-1])


BATCHES = ("loops", "fit_loop", "epoch_loop.batch_progress", "current", "ready")
MISFITS: list[tuple[Callable[[dict], None], str]] = [
    (of_another_model, "its weights are of another model: model.head.bias is (7,) there and (9,) here"),
    (
        setting(torch.zeros(9, dtype=torch.complex64), "state_dict", "model.head.bias"),
        "its weights are of another model: model.head.bias is of torch.complex64",
    ),
    (without("loop_state"), "KeyError: 'loop_state'"),
    (without("loop_state", "random"), "KeyError: 'random'"),
    (setting([], "loop_state"), "TypeError: "),
    (setting([], "loop_state", "random"), "loop_state.random and loop_state.gradients are not those of all"),
    (setting({"csv/metrics.csv": -3}, "loop_state", "log_positions"), "its counters hold -3, which is no count"),
    (setting("7", "epoch"), "its counters hold 7, which is no count"),
    (setting(-5, *BATCHES), "its counters hold -5, which is no count"),
    (setting(True, "global_step"), "its counters hold True, which is no count"),
]


@pytest.mark.parametrize(("how", "said"), MISFITS, ids=[said[:60] for _, said in MISFITS])
def test_what_does_not_fit_the_run_is_found_before_anything_is_restored(how, said, interrupted, fresh):
    path = checkpoints(interrupted) / "last.ckpt"
    checkpoint = load_checkpoint(path)
    check_resumable(checkpoint, path, fresh)
    how(checkpoint)
    with pytest.raises(UserError) as caught:
        check_resumable(checkpoint, path, fresh)
    assert f"{path} cannot be resumed from: {said}" in str(caught.value)


UNRESTORABLE = {
    "a callback's state": setting([], "callbacks", "Checkpoints", "best"),
    "a metric that no float holds": setting(10**400, "callbacks", "Checkpoints", "metrics", "val/loss"),
    "Lightning's version": setting("x", "pytorch-lightning_version"),
    "a group of the optimizer": without("optimizer_states", 0, "param_groups", 0, "params", 0),
    "no state of the optimizer": without("optimizer_states"),
    "a random state": setting([{"torch": torch.zeros(3)}], "loop_state", "random"),
    "a gradient": setting([{"model.head.bias": torch.zeros(7)}], "loop_state", "gradients"),
}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=[pytest.mark.slow] * (n > 0)) for n, w in enumerate(UNRESTORABLE)]
)
def test_what_cannot_be_restored_is_one_line(what: str, killed: Path) -> None:
    change(checkpoints(killed) / "last.ckpt", UNRESTORABLE[what])
    done = run(killed, "resume=out")
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: resume: out/checkpoints/last.ckpt cannot be resumed from: ")
    assert record(killed / "out")["status"] == "failed"


def test_a_metric_that_would_command_the_terminal_is_not_restored(killed: Path) -> None:
    change(checkpoints(killed) / "last.ckpt", setting(1.0, "callbacks", "Checkpoints", "metrics", "test/\x1b]0;x"))
    done = run(killed, "resume=out", "test=false")
    assert (done.end(), done.complained) == (0, "")
    assert not any("\x1b" in key for key in record(killed / "out")["metrics"])
