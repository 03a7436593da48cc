"""What the tests of this room share."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from batchscope.checkpointing.checkpoint_file import load_checkpoint, write_checkpoint
from tests.support.runs import run

OUT = "hydra.run.dir=out"


STEP, VALIDATION, TEST = (f"batchscope.training.task.Task.{kind}_step" for kind in ("training", "validation", "test"))


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def change(path: Path, how: Callable[[dict], None]) -> None:
    checkpoint = load_checkpoint(path)
    how(checkpoint)
    write_checkpoint(checkpoint, path)


def of_another_model(checkpoint: dict) -> None:
    checkpoint["state_dict"]["model.head.bias"] = torch.zeros(7)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def refuses(folder: Path, said: str, *options: str, faults: list | None = None) -> None:
    """Resuming is refused in one line, and nothing is changed."""
    before = everything(folder / "out")
    done = run(folder, "resume=out", *options, faults=faults or [])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith(f"error: resume: {said}")
    assert everything(folder / "out") == before
