"""Helpers and faults that the checkpointing tests share."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from batchscope.checkpointing.checkpoint_file import load_checkpoint, write_checkpoint
from batchscope.data.copy_memory import CopyMemory
from tests.support.runs import Run

OUT = "hydra.run.dir=out"
STEP, VALIDATION, TEST = (f"batchscope.training.task.Task.{kind}_step" for kind in ("training", "validation", "test"))
LOAD = "batchscope.data.copy_memory.CopyMemory.load"
SAVE = "batchscope.checkpointing.checkpoint_file.AtomicCheckpointIO.save_checkpoint"


def send(number: int) -> Callable[[], None]:
    """A fault: send a signal to this process."""
    return partial(signal.raise_signal, number)


terminate, interrupt, hang_up = send(signal.SIGTERM), send(signal.SIGINT), send(signal.SIGHUP)


def break_down() -> None:
    """A fault: raise an unexpected exception."""
    raise RuntimeError("the training broke")


def refused(failed: Run) -> str:
    """Return the one line with which a run fails."""
    assert failed.end() == 1, failed.said
    (line,) = failed.complained.splitlines()
    return line


def change(path: Path, edit: Callable[[dict], object]) -> None:
    checkpoint = load_checkpoint(path)
    edit(checkpoint)
    write_checkpoint(checkpoint, path)


def of_another_model(checkpoint: dict) -> None:
    checkpoint["state_dict"]["model.head.bias"] = torch.zeros(7)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 4  # within the archive's first file
    path.write_bytes(data)


def other_data() -> None:
    """A fault: the dataset differs under the same options."""
    CopyMemory.fingerprint = "0123456789abcdef"


class AsksOnce(Callback):
    """Asks for the end of the training after its first step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == 1
