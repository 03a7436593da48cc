"""How a run that does not finish ends for its user: one line for a failure, and how to resume what was kept.

All words of other libraries that batchscope recognizes a failure by are in this file.
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
from ..errors import DataError, Interrupted, MetricError, PeerLostError, UserError, cut, package_of, place_of
from ..files import LOCK, NO_SPACE, WriteError, is_inside, why
from ..hardware.device_memory import is_out_of_memory, memory_of, total_memory
from ..options.command_lines import resume_command
from ..records.read import FILE
from ..records.terminal import say
from .trial import is_own

_GIB = 2**30
# Errors of a file system that is full, gone or read-only; an error while writing names no file.
_OF_READING_TOO = (errno.EIO, errno.ESTALE)
_UNUSABLE = (*NO_SPACE, errno.EFBIG, errno.EROFS, *_OF_READING_TOO)
_BETWEEN_RANKS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")  # by gloo
_PEER_LOST = "the connection to another process of the run is lost, and the run ends"
_NO_SHARED_MEMORY = (
    "the workers are refused shared memory (/dev/shm) for their batches: {}; give a container more by docker run "
    "--shm-size=8g, or take num_workers=0 (data.num_workers, or that of your DataLoader)"
)


class RunOutOfMemoryError(UserError):
    """The device or the host has no more memory. The record derives the status from this name."""


@contextlib.contextmanager
def explain_failures(config: dict[str, Any], run_dir: Path, trainer: Trainer) -> Iterator[None]:
    """Turn expected failures of a trainer's run into one-line messages (UserError); the first rank prints for all.

    Other exceptions, and Interrupted, are passed on, with what was kept and how to resume it; the same
    is printed where another rank was lost, and for a mistake that shows after the first step.
    """
    try:
        yield
    except Interrupted as stop:
        _tell(trainer, [str(stop), *_how_to_resume(config, run_dir)])
        raise
    except UserError as error:
        if isinstance(error, DataError | MetricError) and trainer.global_step:
            _tell(trainer, _how_to_resume(config, run_dir))
        raise
    except Exception as error:
        said = explained(error, config, run_dir, trainer) or _of_lightning(error, trainer)
        if said is None:
            if trainer.is_global_zero and (lines := _how_to_resume(config, run_dir)):
                error.add_note("\n".join(["", *lines]))
            raise
        if isinstance(said, PeerLostError) or (type(said) is UserError and trainer.global_step):
            _tell(trainer, _how_to_resume(config, run_dir))
        raise said from error


def _tell(trainer: Trainer, lines: list[str]) -> None:
    """Print lines below an empty one, in the first rank."""
    if trainer.is_global_zero and lines:
        say("\n".join(["", *lines]))


def _how_to_resume(config: dict[str, Any], run_dir: Path) -> list[str]:
    """What was kept, and the command that resumes the run, or starts it again; nothing for a run that has not begun."""
    run_dir = Path(relative(run_dir))
    if not (run_dir / FILE).exists():
        return []
    command = resume_command(config, run_dir)
    last = run_dir / CHECKPOINTS / "last.ckpt"
    if last.exists():
        return [f"kept     {last}", f"resume   {command}"]
    return ["kept     no checkpoint", f"restart  {command}"]  # from its first step


def explained(error: Exception, config: dict[str, Any], run_dir: Path, trainer: Trainer) -> UserError | None:
    """The one line for an exception in a trainer's run; None for one that is nobody's failure but the code's."""
    if no_room := next(filter(is_shared_memory_error, _chain(error)), None):
        return WriteError(f"data: {_NO_SHARED_MEMORY.format(str(no_room).strip().splitlines()[-1])}")
    if unsendable := _unsendable(error):
        return unsendable
    lost = [one for one in _chain(error) if isinstance(one, RuntimeError) and "DataLoader worker (pid" in str(one)]
    if lost:
        said = str(lost[-1]).rstrip(". ")  # torch wraps the error that names the signal
        # The system kills a process where memory is short, of which torch may miss the signal. Then the run is killed, as by
        # a rank that was, and not failed.
        kind = UserError if "by signal: " in said and "by signal: Killed" not in said else PeerLostError
        fewer = "fewer workers (data.num_workers, or num_workers of your DataLoader)"
        return kind(f"data: {said}; where memory is short, take {fewer}")
    if is_out_of_memory(error):
        return RunOutOfMemoryError(_out_of_memory(config, trainer.strategy.root_device))
    if isinstance(error, torch.distributed.DistNetworkError) and "EADDRINUSE" in str(error):
        return None  # torch names the port
    if isinstance(error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError):
        return PeerLostError(_PEER_LOST)  # the process group could not be made
    if (
        isinstance(error, RuntimeError)
        and trainer.world_size > 1
        and any(said in str(error) for said in _BETWEEN_RANKS)
    ):
        return PeerLostError(_PEER_LOST)
    if config.get("compile") and is_compilation_error(error):
        return UserError(_cannot_compile(config, error))
    if refused := _refused_file(error, run_dir):
        return WriteError(f"{os.fsdecode(refused.filename or relative(run_dir))} cannot be written: {why(refused)}")
    return None


def _unsendable(error: Exception) -> UserError | None:
    """The one line where a DataLoader of the user's own could not start its workers, because of what they are sent.

    Lightning raises another error while it handles that one.
    """
    for cause in _chain(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if isinstance(loader := frame.f_locals.get("loader"), DataLoader):
                try:
                    check_sendable(loader, "num_workers=0 for its DataLoader")
                except UserError as said:
                    return said
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it or was being handled when it occurred, and so on; each once, for one may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _of_lightning(error: Exception, trainer: Trainer) -> UserError | None:
    """The one line for what Lightning refuses: an option, or a module that it cannot train; None for another error.

    It refuses by its own kind of error, or by one that it has raised itself. After the first update one that the user's
    own code has led to is a bug in that code.
    """
    is_of_its_kind = isinstance(error, MisconfigurationException)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_raised_by_it = isinstance(error, RuntimeError | TypeError | ValueError) and package_of(frame) == "lightning"
    place = place_of(error, is_own)
    if not (is_of_its_kind or is_raised_by_it) or (place and trainer.global_step):
        return None
    first, *_ = str(error).strip().splitlines() or [""]
    return UserError(f"trainer: {first}{place}")


def _cannot_compile(config: dict[str, Any], error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    asked, model = str(config["compile"]).lower(), config["model"]["_target_"].rpartition(".")[2]
    first = cut(lines[0], 200) if lines else type(error).__name__
    return f"compile: {asked} fails for {model}: {first}; write compile=false"


def _refused_file(failed: BaseException | None, run_dir: Path) -> OSError | None:
    """The OSError that caused an exception, if it concerns the disk or a file in the run's folder.

    Lightning wraps the errors of its loggers, so causes are followed. An error that was being handled when another one
    occurred is not its cause: of those only an error of the disk counts.
    """
    is_cause = True
    for error in _chain(failed):
        if isinstance(error, OSError):
            # Nobody has written the file; without the lock file, somebody has removed the run's folder.
            is_bug = isinstance(error, FileNotFoundError) and os.path.lexists(run_dir / LOCK)
            name = error.filename
            is_inside_run = isinstance(name, str | bytes) and is_inside(Path(os.fsdecode(name)), run_dir)
            is_read = name is not None and not is_inside_run and error.errno in _OF_READING_TOO  # such as a data file
            if (is_inside_run and is_cause and not is_bug) or (error.errno in _UNUSABLE and not is_read):
                return error
        is_cause = is_cause and error.__cause__ is not None
    return None


def _out_of_memory(config: dict[str, Any], device: torch.device) -> str:
    _, held = memory_of(device) or (0, 0)
    size = config["data"].get("batch_size")
    asked = "" if size is None else f" with data.batch_size={size}"
    smaller = "batch" if size is None else "model" if size == 1 else "data.batch_size"
    return (
        f"out of memory{asked} on {device.type}: {held / _GIB:.2f} GiB were allocated of {total_memory(device) / _GIB:.2f}; "
        f"try a smaller {smaller}"
    )
