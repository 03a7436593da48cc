"""A checkpoint is written atomically, damage is found when it is read, and nothing in it is ever run."""

import resource
import zipfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from batchscope.checkpointing.callback import Checkpoints, _plain_tensor
from batchscope.checkpointing.checkpoint_file import (
    AtomicCheckpointIO,
    check_weights,
    copy_checkpoint,
    load_checkpoint,
    write_checkpoint,
)
from batchscope.errors import UserError
from batchscope.files import WriteError
from tests.checkpointing.support import OUT, STEP
from tests.support.command_lines import refusal
from tests.support.runs import EVERY_4, SMALL, assert_alike, last, record, run
from tests.support.third_party_modules import Stranger, loader, train

CHECKPOINT = {"state_dict": {"weight": torch.arange(10_000.0)}, "batchscope": {"name": "a", "config": {}}, "step": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    write_checkpoint(CHECKPOINT, path)
    return path


def test_what_was_written_is_read_also_by_torch_and_zip_programs_and_nothing_else_is_left(path: Path) -> None:
    for loaded in (load_checkpoint(path), torch.load(path, weights_only=True)):
        assert_alike(loaded, CHECKPOINT)
    assert zipfile.ZipFile(path).testzip() is None
    assert list(path.parent.iterdir()) == [path]


def test_a_flipped_bit_is_found_or_changes_nothing(path: Path) -> None:
    original, num_errors = path.read_bytes(), 0
    offsets = [*range(0, len(original), 197), *range(len(original) - 1500, len(original), 11)]
    for offset in offsets:
        damaged = bytearray(original)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        try:
            loaded = load_checkpoint(path)
        except UserError as error:
            assert str(path) in str(error)
            num_errors += 1
        else:  # in unread bytes: a timestamp, or padding between two files of the archive
            assert_alike(loaded, CHECKPOINT, f"byte {offset}")
    assert num_errors > 0.8 * len(offsets)


def test_a_name_that_would_command_the_terminal_is_none(path: Path) -> None:
    write_checkpoint({**CHECKPOINT, "batchscope": {"name": "\x1b[2J", "config": {}}}, path)
    assert refusal(load_checkpoint, path) == f"ckpt: {path} is not a checkpoint that batchscope wrote"


def test_the_best_one_is_kept_when_the_last_one_goes_on(path: Path) -> None:
    best = path.with_name("best.ckpt")
    copy_checkpoint(path, best)
    copy_checkpoint(path, best)
    write_checkpoint(CHECKPOINT | {"step": 4}, path)
    assert load_checkpoint(best)["step"] == 3
    assert sorted(p.name for p in path.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_an_interrupted_copy_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(path, path.with_name("best.ckpt"))
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_takes_no_checkpoint_is_one_line_that_says_so(path: Path) -> None:
    there = path / "best.ckpt"  # below a file
    for write in (lambda: write_checkpoint(CHECKPOINT, there), lambda: copy_checkpoint(path, there)):
        with pytest.raises(WriteError, match=f"^checkpoint: {there} .*cannot be written: .*$"):
            write()


def test_layers_that_a_strategy_makes_later_are_taken_and_sparse_ones_are_not() -> None:
    with torch.device("meta"):
        check_weights(torch.nn.Linear(2, 2).state_dict())
    assert refusal(check_weights, {"graph": torch.eye(2).to_sparse()}).startswith(
        "model: 'graph' could not be read back"
    )


class Confusion(Callback):
    """Keeps an object of every validation in its state."""

    def __init__(self, entry: Any) -> None:
        self.kept, self.matrices = entry, []

    def on_validation_end(self, *args: Any) -> None:
        self.matrices.append(self.kept)

    def state_dict(self) -> dict[str, Any]:
        return {"matrices": self.matrices}


def test_a_state_that_becomes_unreadable_ends_the_run_and_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    options = {"plugins": [AtomicCheckpointIO()], "enable_checkpointing": True, "data": (loader(), loader())}
    options |= {"num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    line = refusal(train, Stranger(), Confusion(numpy.eye(2)), checkpoints, **options)
    assert (
        line == "checkpoint: its entry 'callbacks' could not be read back: it holds more than tensors and plain values"
    )
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 0


# From now on the system limits the size of the process's files.
FILL_THE_DISK = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (8_000, 8_000))


def test_a_full_disk_is_one_line_with_the_bytes_needed_and_the_checkpoint_before_still_loads(tmp_path: Path) -> None:
    stopped = run(tmp_path, *SMALL, EVERY_4, OUT, faults=[(STEP, 6, FILL_THE_DISK)], code=1)
    # TensorBoard's thread prints an error of its own.
    (line,) = (line for line in stopped.complained.splitlines() if line.startswith("error: "))
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert line.startswith("error: checkpoint: out/checkpoints/last.ckpt needs ")
    assert abs(int(line.split("needs ")[1].split(" bytes")[0].replace(",", "")) - checkpoint.stat().st_size) < 2_000
    assert line.endswith("the checkpoint before it is kept: out/checkpoints/last.ckpt")
    assert last(tmp_path / "out")["global_step"] == 4
    assert record(tmp_path / "out")["status"] == "interrupted"


def test_a_logged_number_of_any_class_is_kept_as_a_plain_tensor() -> None:
    class Own(torch.Tensor): ...

    for number in (torch.tensor(0.5).as_subclass(Own), 0.5, numpy.float32(0.5)):
        logged = _plain_tensor(number)
        assert (type(logged), logged.item()) == (torch.Tensor, 0.5)
