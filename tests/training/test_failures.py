"""A run that cannot continue ends with one line that says why, and keeps what it had."""

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import synchronize
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch._inductor.exc import CppCompileError
from torch.utils.data import DataLoader, Dataset

from batchscope.errors import DataError, PeerLostError, UserError
from batchscope.files import WriteError
from batchscope.training.failures import _resume_lines, explain_failures
from tests.checkpointing.support import OUT, STEP
from tests.support.command_lines import refusal
from tests.support.marks import LINUX
from tests.support.runs import EVERY_4, SMALL, last, record, run


def break_one_loss() -> None:
    """The next loss is not a number."""
    from batchscope.training.task import Task

    inner = Task.loss

    def broken(self: Task, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        Task.loss = inner
        return inner(self, output, y) * float("nan")

    Task.loss = broken


def stopped(folder: Path, *words: str, fault: Callable[[], None]) -> str:
    """The error line of a run that a fault ends in step 6."""
    process = run(folder, *words, EVERY_4, OUT, faults=[(STEP, 6, fault)])
    assert process.end() == 1
    (line,) = process.complained.splitlines()
    assert last(folder / "out")["global_step"] == 4
    return line


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    line = stopped(tmp_path, *SMALL, fault=break_one_loss)
    assert line.startswith(
        "error: step 6 (batch 5 of epoch 0, learning rate 0.004): the loss is nan, the gradient of model."
    )
    assert record(tmp_path / "out")["status"] == "not_finite"
    assert record(tmp_path / "out")["error"] == line.removeprefix("error: ")


def lose_a_sample() -> None:
    raise DataError("data: sample number 7 cannot be loaded")


def test_a_sample_that_cannot_be_loaded_is_one_line_and_how_to_resume(tmp_path: Path) -> None:
    process = run(tmp_path, *SMALL, EVERY_4, OUT, faults=[(STEP, 6, lose_a_sample)])
    assert (process.end(), process.complained) == (1, "error: data: sample number 7 cannot be loaded\n")
    assert process.said.endswith("kept     out/checkpoints/last.ckpt\nresume   batchscope train resume=out\n")


def test_a_run_of_a_sweep_does_not_say_how_to_resume_it_alone(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run.json").touch()
    assert _resume_lines({}, tmp_path)[-1].startswith("restart  batchscope train resume=")
    monkeypatch.setenv("BATCHSCOPE_IN_SWEEP", "1")
    assert _resume_lines({}, tmp_path) == []


def test_out_of_memory_is_told_with_the_batch_size_and_what_to_try(tmp_path: Path) -> None:
    line = stopped(tmp_path, *SMALL, fault=partial(torch.empty, 10**15))
    assert line.startswith("error: out of memory with data.batch_size=8 on cpu: ")
    assert " GiB were allocated of " in line
    assert "try a smaller data.batch_size" in line
    assert record(tmp_path / "out")["memory"]["parts_bytes"]["saved"] > 0
    assert record(tmp_path / "out")["status"] == "out_of_memory"


# --- which exceptions are translated ----------------------------------------------------------------------------------

CONFIG = {"compile": True, "model": {"_target_": "batchscope.models.mlp.MLP"}}


def end(error: BaseException, config: dict[str, Any] = CONFIG, ranks: int = 2, steps: int = 0) -> None:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(strategy=strategy, is_global_zero=True, world_size=ranks, global_step=steps)
    with explain_failures(config, Path("out"), trainer):
        raise error


def wrapped(error: Exception, **links: Exception) -> Exception:
    """An error with a cause (Lightning raises its own errors from others) or a context (a bug in an exception handler)."""
    for link, linked_error in links.items():
        setattr(error, f"__{link}__", linked_error)
    return error


@pytest.mark.parametrize(
    ("size", "hint"), [(8, "try a smaller data.batch_size"), (None, "try a smaller batch"), (1, "try a smaller model")]
)
def test_out_of_memory_recommends_a_smaller_batch(size, hint):
    config = {"data": {"batch_size": size}, "trainer": {"precision": "32-true"}}
    assert refusal(end, MemoryError(), config).endswith(f"; {hint}")


def test_memory_that_a_device_does_not_report_is_left_out(monkeypatch):
    monkeypatch.setattr("batchscope.training.failures.training_memory", lambda device: None)
    line = refusal(end, torch.OutOfMemoryError("CUDA out of memory"), {"data": {"batch_size": 8}})
    assert line == "out of memory with data.batch_size=8 on cpu; try a smaller data.batch_size"


PEER = "the connection to another process of the run is lost, and the run ends"
REMOVED = FileNotFoundError(errno.ENOENT, "No such file", b"out/events")
REFUSED = IsADirectoryError(errno.EISDIR, "Is a directory", "out/csv/metrics.csv")
FULL = OSError(errno.ENOSPC, "No space left", "out/events")
NO_ROOM = "the workers are refused shared memory (/dev/shm) for their batches"
SHARED = "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
BUS = "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."


def of_semaphore() -> OSError:
    """The error that creating a semaphore raises where /dev/shm is read-only."""
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with pytest.MonkeyPatch.context() as patched, pytest.raises(OSError) as caught:
        patched.setattr(synchronize._multiprocessing, "SemLock", Mock(side_effect=refused))
        synchronize.Lock(ctx=multiprocessing.get_context())
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (FULL, WriteError, "out/events cannot be written: the disk is full (No space"),
        (wrapped(ValueError(), cause=FULL), WriteError, "out/events cannot be written: the disk is full (No space"),
        (OSError(errno.EIO, "I/O"), WriteError, "out cannot be written: "),  # names no file
        (wrapped(ValueError(), context=OSError(errno.ESTALE, "Stale")), WriteError, "out cannot be written: "),
        (OSError(errno.EROFS, "Read-only"), WriteError, "out cannot be written: "),
        (REFUSED, WriteError, "out/csv/metrics.csv cannot be written: Is a directory"),
        (wrapped(ValueError(), cause=REFUSED), WriteError, "out/csv/metrics.csv cannot be written: Is a directory"),
        (REMOVED, WriteError, "out/events cannot be written: No such file"),
        (torch.distributed.DistNetworkError("Broken pipe"), PeerLostError, PEER),
        (torch.distributed.DistStoreError("Timed out"), PeerLostError, PEER),
        (RuntimeError("[pair.cc:561] Connection closed by peer [::1]:8857."), PeerLostError, PEER),
        (MisconfigurationException("You requested it.\nHint"), UserError, "trainer: You requested it. (tests/training/test_failures.py, line "),
        (RuntimeError(f"Caught it in worker 0.\n{SHARED}"), WriteError, f"data: {NO_ROOM}: {SHARED}; give a container more by docker run --shm-size=8g, or take num_workers=0 (data.num_workers, or that of your DataLoader)"),
        (RuntimeError(f"DataLoader worker (pid 7) is killed by signal: Bus error. {BUS}"), WriteError, f"data: {NO_ROOM}: DataLoader worker"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), PeerLostError, "data: DataLoader worker (pid 7) is killed by signal: Killed; where"),
        (wrapped(RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), cause=RuntimeError(f"DataLoader worker (pid 7) is killed by signal: Bus error. {BUS}")), WriteError, f"data: {NO_ROOM}: DataLoader worker (pid 7)"),
        (RuntimeError("DataLoader worker (pid unknown) ended while it sent a batch"), PeerLostError, "data: DataLoader worker (pid unknown) ended while it sent a batch; where"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), PeerLostError, "data: DataLoader worker (pid(s) 7) exited unexpectedly; where"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault. "), UserError, "data: DataLoader worker (pid 7) is killed by"),
        (of_semaphore(), WriteError, f"data: {NO_ROOM}: [Errno 30] Read-only file system; "),
        (CppCompileError(["g++"], "internal error"), UserError, "compile: true fails for MLP: C++ compile error; write "),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Exception) else "",
)  # fmt: skip
def test_what_a_library_or_the_system_says_is_one_line(error: Exception, kind: type, line: str) -> None:
    assert refusal(end, error).startswith(line)
    with pytest.raises(kind):
        end(error)


class KillsItsWorker(Dataset):
    """Kills the process that loads a sample, as the system does when memory runs out."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@LINUX
def test_a_run_whose_worker_is_killed_was_killed_and_has_not_failed() -> None:
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(KillsItsWorker(), num_workers=1, multiprocessing_context="fork", timeout=1)))
    message = r"^data: DataLoader worker \(pid.*\d+\) (is killed by signal: Killed|exited unexpectedly); where"  # whichever comes first
    with pytest.raises(PeerLostError, match=message):
        end(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "outside/file"),
        OSError(errno.ESTALE, "Stale file handle", "outside/data.npy"),
        FileNotFoundError(errno.ENOENT, "No such file", "out/a file that nobody wrote"),
        wrapped(ZeroDivisionError(), context=REFUSED),
        torch.distributed.DistNetworkError("The server socket has failed to listen: code: -98, name: EADDRINUSE"),
    ],
    ids=[
        "another file",
        "data that cannot be read",
        "a missing file",
        "a bug in dealing with a refused file",
        "a port",
    ],
)
def test_a_bug_stays_a_bug(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("out")
    Path("out/.lock").touch()
    with pytest.raises(type(error)):
        end(error)


def test_what_lightning_refuses_in_code_of_the_user_after_the_first_update_is_a_bug_of_that_code() -> None:
    with pytest.raises(MisconfigurationException):
        end(MisconfigurationException("You requested it."), steps=1)


def test_one_process_has_lost_no_other_one() -> None:
    with pytest.raises(RuntimeError, match="^ffmpeg: Broken pipe$"):
        end(RuntimeError("ffmpeg: Broken pipe"), ranks=1)


def test_an_error_that_is_its_own_cause_is_passed_on() -> None:
    error = KeyError("mine")
    error.__cause__ = error  # as `raise error from error` does
    with pytest.raises(KeyError):
        end(error)
