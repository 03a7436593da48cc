"""What a user reads about a run that fails or is interrupted: one line for the failure, and how to resume the run.

All words in messages of other libraries by which batchscope recognizes a failure are in this file.
"""

import contextlib
import errno
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from .._system import relative
from .._torch import is_compilation_error, is_shared_memory_error
from ..checkpointing.callback import CHECKPOINTS
from ..data.workers import check_sendable
from ..errors import DataError, Interrupted, MetricError, PeerLostError, UserError, cut, location_of, package_of
from ..files import LOCK, NO_SPACE, WriteError, is_inside, why
from ..hardware.device_memory import is_out_of_memory, total_memory, training_memory
from ..options.command_lines import resume_command
from ..records.read import FILE
from ..records.terminal import is_in_sweep, say
from .trial import is_own

_GIB = 2**30
# Errors of a file system that is full, gone or read-only; an error while writing names no file.
_READ_OR_WRITE_ERRORS = (errno.EIO, errno.ESTALE)
_DISK_ERRORS = (*NO_SPACE, errno.EFBIG, errno.EROFS, *_READ_OR_WRITE_ERRORS)
_GLOO_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
_PEER_LOST = "the connection to another process of the run is lost, and the run ends"
_NO_SHARED_MEMORY = (
    "the workers are refused shared memory (/dev/shm) for their batches: {}; give a container more by docker run "
    "--shm-size=8g, or take num_workers=0 (data.num_workers, or that of your DataLoader)"
)


class RunOutOfMemoryError(UserError):
    """The device or the host has no more memory. The record derives the run's status from the name of this class."""


@contextlib.contextmanager
def explain_failures(config: dict[str, Any], run_dir: Path, trainer: Trainer) -> Iterator[None]:
    """Turn expected failures of a trainer's run into one-line messages (UserError); the first rank prints for all.

    Other exceptions, and Interrupted, pass through, with the checkpoint that was kept and the command to resume. Both are
    printed, too, after a lost rank, and for a mistake that shows after the first step.
    """
    try:
        yield
    except Interrupted as interrupt:
        _print_lines(trainer, [str(interrupt), *_resume_lines(config, run_dir)])
        raise
    except UserError as error:
        if isinstance(error, DataError | MetricError) and trainer.global_step:
            _print_lines(trainer, _resume_lines(config, run_dir))
        raise
    except Exception as error:
        user_error = explained(error, config, run_dir, trainer) or _lightning_refusal(error, trainer)
        if user_error is None:
            if trainer.is_global_zero and (lines := _resume_lines(config, run_dir)):
                error.add_note("\n".join(["", *lines]))
            raise
        if isinstance(user_error, PeerLostError) or (type(user_error) is UserError and trainer.global_step):
            _print_lines(trainer, _resume_lines(config, run_dir))
        raise user_error from error


def _print_lines(trainer: Trainer, lines: list[str]) -> None:
    """Print lines after an empty line, in the first rank."""
    if trainer.is_global_zero and lines:
        say("\n".join(["", *lines]))


def _resume_lines(config: dict[str, Any], run_dir: Path) -> list[str]:
    """Return the lines with the checkpoint and the command to resume or restart; none for a run that has not begun.

    A sweep is resumed as a whole, and prints its own command.
    """
    run_dir = Path(relative(run_dir))
    if is_in_sweep() or not (run_dir / FILE).exists():
        return []
    command = resume_command(config, run_dir)
    last = run_dir / CHECKPOINTS / "last.ckpt"
    if last.exists():
        return [f"kept     {last}", f"resume   {command}"]
    return ["kept     no checkpoint", f"restart  {command}"]  # from its first step


def explained(error: Exception, config: dict[str, Any], run_dir: Path, trainer: Trainer) -> UserError | None:
    """Return the one-line error for an exception in a trainer's run; None for an exception that may be a bug."""
    if memory_error := next(filter(is_shared_memory_error, _exception_chain(error)), None):
        return WriteError(f"data: {_NO_SHARED_MEMORY.format(str(memory_error).strip().splitlines()[-1])}")
    if unpicklable := _unpicklable_loader(error):
        return unpicklable
    errors = (cause for cause in _exception_chain(error) if isinstance(cause, RuntimeError))
    if messages := [str(cause) for cause in errors if "DataLoader worker (pid" in str(cause)]:
        message = messages[-1].rstrip(". ")  # torch wraps the error that names the signal
        # The system kills a process if memory is short, and torch may miss the signal. The run then counts as killed, as
        # after a lost rank, and not as failed.
        kind = UserError if "by signal: " in message and "by signal: Killed" not in message else PeerLostError
        advice = "take fewer workers (data.num_workers, or num_workers of your DataLoader)"
        return kind(f"data: {message}; where memory is short, {advice}")
    if is_out_of_memory(error):
        return RunOutOfMemoryError(_out_of_memory_message(config, trainer.strategy.root_device))
    if isinstance(error, torch.distributed.DistNetworkError) and "EADDRINUSE" in str(error):
        return None  # torch names the port
    if isinstance(error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError):
        return PeerLostError(_PEER_LOST)  # the process group could not be made
    if (
        isinstance(error, RuntimeError)
        and trainer.world_size > 1
        and any(message in str(error) for message in _GLOO_MESSAGES)
    ):
        return PeerLostError(_PEER_LOST)
    if config.get("compile") and is_compilation_error(error):
        return UserError(_compilation_message(config, error))
    if os_error := _write_error(error, run_dir):
        return WriteError(f"{os.fsdecode(os_error.filename or relative(run_dir))} cannot be written: {why(os_error)}")
    return None


def _unpicklable_loader(error: Exception) -> UserError | None:
    """Return the one-line error for a user's DataLoader that could not start its workers: they get what cannot be pickled.

    Lightning raises another error while it handles the loader's.
    """
    for cause in _exception_chain(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if isinstance(loader := frame.f_locals.get("loader"), DataLoader):
                try:
                    check_sendable(loader, "num_workers=0 for its DataLoader")
                except UserError as user_error:
                    return user_error
    return None


def _exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause or context, and so on; each error once, because an error may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _lightning_refusal(error: Exception, trainer: Trainer) -> UserError | None:
    """Return the one-line error for an option or a module that Lightning refuses; None for another error.

    Lightning refuses by its MisconfigurationException, or by an error that it raises itself. After the first update, an
    error to which the user's own code has led is a bug in that code.
    """
    is_misconfiguration = isinstance(error, MisconfigurationException)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_raised_there = isinstance(error, RuntimeError | TypeError | ValueError) and package_of(frame) == "lightning"
    place = location_of(error, is_own)
    if not (is_misconfiguration or is_raised_there) or (place and trainer.global_step):
        return None
    first_line, *_ = str(error).strip().splitlines() or [""]
    return UserError(f"trainer: {first_line}{place}")


def _compilation_message(config: dict[str, Any], error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    mode, model = str(config["compile"]).lower(), config["model"]["_target_"].rpartition(".")[2]
    first_line = cut(lines[0], 200) if lines else type(error).__name__
    return f"compile: {mode} fails for {model}: {first_line}; write compile=false"


def _write_error(raised: BaseException | None, run_dir: Path) -> OSError | None:
    """Return the OSError that caused an exception, if it concerns the disk or a file in the run's folder.

    Lightning wraps the errors of its loggers, so causes are followed. The context of an exception, an error that was being
    handled when the exception was raised, is not its cause: of contexts only an error of the disk counts.
    """
    is_cause = True
    for error in _exception_chain(raised):
        if isinstance(error, OSError):
            # Nobody has written the file. If the lock file is missing, too, somebody has removed the run's folder.
            is_bug = isinstance(error, FileNotFoundError) and os.path.lexists(run_dir / LOCK)
            name = error.filename
            is_in_run = isinstance(name, str | bytes) and is_inside(Path(os.fsdecode(name)), run_dir)
            is_read = name is not None and not is_in_run and error.errno in _READ_OR_WRITE_ERRORS  # such as a data file
            if (is_in_run and is_cause and not is_bug) or (error.errno in _DISK_ERRORS and not is_read):
                return error
        is_cause = is_cause and error.__cause__ is not None
    return None


def _out_of_memory_message(config: dict[str, Any], device: torch.device) -> str:
    memory, total = training_memory(device), total_memory(device) / _GIB
    allocated = f": {memory[1] / _GIB:.2f} GiB were allocated of {total:.2f}" if memory else ""
    size = config["data"].get("batch_size")
    size_words = "" if size is None else f" with data.batch_size={size}"
    to_reduce = "batch" if size is None else "model" if size == 1 else "data.batch_size"
    return f"out of memory{size_words} on {device.type}{allocated}; try a smaller {to_reduce}"
