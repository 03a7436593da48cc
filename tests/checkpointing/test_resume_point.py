"""A run is resumed from its last valid checkpoint, and a resume that is refused changes nothing."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpointing.support import OUT, STEP, change, everything, of_another_model, refuses
from tests.support.runs import EVERY_4, SMALL, assert_alike, curves, kill_9, record, results, run


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
def test_a_run_whose_checkpoints_lie_elsewhere_is_resumed_from_them(tmp_path: Path, unstopped: Path) -> None:
    elsewhere = f"callbacks.checkpoint.dirpath={tmp_path / 'scratch'}"
    assert run(tmp_path, *SMALL, EVERY_4, OUT, elsewhere, faults=[(STEP, 10, kill_9)]).end() == -9
    shutil.move(tmp_path / "out", tmp_path / "moved")
    done = run(tmp_path / "from", "resume=../moved", elsewhere)
    assert done.end() == 0, done.complained
    shutil.move(tmp_path / "moved", tmp_path / "out")
    assert [entry["step"] for entry in record(tmp_path / "out")["resumed"]] == [8]
    assert curves(tmp_path / "out") == curves(unstopped)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    elsewhere = f"callbacks.checkpoint.dirpath={tmp_path / 'scratch'}"
    for run_dir in ("mine", "theirs"):
        assert (
            run(tmp_path, *SMALL, EVERY_4, elsewhere, f"hydra.run.dir={run_dir}", faults=[(STEP, 10, kill_9)]).end()
            == -9
        )
    done = run(tmp_path, "resume=mine", elsewhere)
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.endswith("/scratch/last.ckpt is of another run, which began in theirs")


def test_a_damaged_last_checkpoint_is_named_and_the_best_one_used(killed: Path, unstopped: Path) -> None:
    flip_a_bit(killed / "out" / "checkpoints" / "last.ckpt")
    done = run(killed, "resume=out")
    assert done.end() == 0
    (line,) = done.complained.splitlines()
    assert line.startswith("warning: out/checkpoints/last.ckpt is damaged")
    assert line.endswith("resuming from best.ckpt instead")
    assert_alike(results(killed / "out"), results(unstopped))


def test_without_a_valid_checkpoint_nothing_is_trained_or_changed(killed: Path) -> None:
    checkpoints = killed / "out" / "checkpoints"
    flip_a_bit(checkpoints / "last.ckpt")
    (checkpoints / "best.ckpt").unlink()
    (checkpoints / "best.ckpt").write_bytes(b"")
    before = {path: path.read_bytes() for path in (killed / "out").rglob("*") if path.is_file()}
    done = run(killed, "resume=out")
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: resume: no checkpoint is valid, and nothing was changed: out/checkpoints/")
    assert "last.ckpt is damaged" in line and "best.ckpt is not a whole checkpoint (0 bytes)" in line
    assert {path: path.read_bytes() for path in (killed / "out").rglob("*") if path.is_file()} == before


def test_other_data_are_refused(killed: Path) -> None:
    # The options are the same, and the dataset has changed.
    other = ("batchscope.data.datamodule.hashlib.blake2b", 1, _other_seed)
    done = run(killed, "resume=out", faults=[other])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: resume: the data have changed: their fingerprint is ")


def _other_seed() -> None:
    from batchscope.data.copy_memory import CopyMemory

    CopyMemory.fingerprint = "0123456789abcdef"


@pytest.mark.parametrize(
    "refused",
    [
        "another model",
        *(
            pytest.param(r, marks=pytest.mark.slow)
            for r in ("trainer.max_epochs=1", "trainer.max_steps=15", "other data")
        ),
    ],
)
def test_a_refused_resume_changes_nothing_of_a_finished_run(refused: str, tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, OUT, "optimizer.schedule=constant")
    assert done.end() == 0, done.complained
    longer, faults = [refused] if refused.startswith("trainer") else ["trainer.max_epochs=3"], []
    if refused == "other data":
        faults = [("batchscope.data.datamodule.hashlib.blake2b", 1, _other_seed)]
    if refused == "another model":
        for name in ("best", "last"):
            change(tmp_path / "out" / "checkpoints" / f"{name}.ckpt", of_another_model)
    before = everything(tmp_path / "out")
    done = run(tmp_path, "resume=out", *longer, faults=faults)
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: ")
    assert everything(tmp_path / "out") == before


def test_a_checkpoint_of_another_model_is_named_and_the_best_one_used(killed: Path, unstopped: Path) -> None:
    change(killed / "out" / "checkpoints" / "last.ckpt", of_another_model)
    done = run(killed, "resume=out")
    assert done.end() == 0, done.complained
    (line,) = done.complained.splitlines()
    assert line.startswith(
        "warning: out/checkpoints/last.ckpt cannot be resumed from: its weights are of another model: model.head.bias is "
        "(7,) there and (9,) here; resuming from best.ckpt instead"
    )
    assert_alike(results(killed / "out"), results(unstopped))


def test_a_run_whose_checkpoints_are_gone_is_not_started_again(killed: Path) -> None:
    facts = record(killed / "out")
    (killed / "out" / "run.json").write_text(json.dumps({**facts, "resumed": [{"step": 8}]}))
    (killed / "out" / "checkpoints").rename(killed / "unmounted")
    refuses(killed, "out/checkpoints holds no checkpoint, and the run has trained 8 steps; put its checkpoints back")


def test_a_checkpoint_folder_that_is_a_file_is_refused(killed: Path) -> None:
    shutil.rmtree(killed / "out" / "checkpoints")
    (killed / "out" / "checkpoints").write_text("")
    refuses(killed, "out/checkpoints cannot be read, and nothing was changed: Not a directory")


def _read_only() -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_the_curves_are_cut(killed: Path) -> None:
    fault = ("pathlib.Path.touch", 1, _read_only)
    refuses(killed, "out/checkpoints cannot be written, and nothing was changed: Read-only", faults=[fault])
