"""Expected failures of a run in one line each: an interruption, out of memory, a full disk, a lost rank."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from .._torch import is_compilation_error
from ..errors import Interrupted, PeerLostError, UserError
from ..files import NO_SPACE, WriteError, is_inside, why
from ..hardware.calibration import faster_precision
from ..hardware.calibration_cache import cached_calibration
from ..hardware.device_memory import is_out_of_memory
from ..hardware.host_memory import host_memory
from ..options.command_lines import resume_command
from ..records import formatting
from ..records.read import FILE

_GIB = 2**30
# Errors of a file system that is full, gone or read-only; an error while writing names no file.
_UNUSABLE = (*NO_SPACE, errno.EIO, errno.ESTALE, errno.EROFS)
# Classes, and words in other RuntimeErrors: torch cannot reach a peer when the process group is made, or in a collective
# operation of gloo.
_LOST_PEER = (
    (torch.distributed.DistNetworkError, torch.distributed.DistStoreError),
    ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed"),
)


class RunOutOfMemoryError(UserError):
    """The device or the host has no more memory. The record derives the status from this name."""


@contextlib.contextmanager
def explain_failures(
    config: dict[str, Any], device: torch.device, first: bool, memory: Callable[[], Mapping[str, Any]] = dict
) -> Iterator[None]:
    """Turn expected failures of a run on a device into one-line messages; the first rank prints for all.

    `memory` returns the facts of the run's MemoryMonitor.

    Raises:
        UserError: in place of an error of torch or the system that a user can do something about.
        Interrupted: passed on, after the command that resumes the run has been printed.
    """
    try:
        yield
    except Interrupted as stop:
        if first:
            _print_how_to_resume(config, stop)
        raise
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise RunOutOfMemoryError(_out_of_memory(config, device, memory())) from error
        if _is(error, (), ("DataLoader worker (pid",)):
            raise UserError(f"data: {error}; where memory is short, take fewer data.num_workers") from error
        if _is(error, *_LOST_PEER):
            raise PeerLostError("the connection to another process of the run is lost, and the run ends") from error
        if _is(error, (), ("sparse gradients",)):  # the words of every optimizer of torch
            raise UserError(
                f"optimizer: {error}; write optimizer=adagrad without weight_decay, or give the model's embeddings sparse=False"
            ) from error
        if config.get("compile") and is_compilation_error(error):
            raise UserError(_cannot_compile(config, error)) from error
        refused = _refused_file(error, config["run_dir"])
        if refused is None:
            raise
        raise WriteError(f"{refused.filename or config['run_dir']} cannot be written: {why(refused)}") from error


def _cannot_compile(config: dict[str, Any], error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    asked, model = str(config["compile"]).lower(), config["model"]["_target_"].rpartition(".")[2]
    first = lines[0][:200] if lines else type(error).__name__
    return f"compile: {asked} fails for {model}: {first}; write compile=false"


def _print_how_to_resume(config: dict[str, Any], stop: Interrupted) -> None:
    run_dir = Path(config["run_dir"])
    print(f"\n{stop}")
    if (run_dir / FILE).exists():  # without a record nothing has been trained yet
        checkpoint = (config["callbacks"] or {}).get("checkpoint")
        last = Path((checkpoint or {}).get("dirpath") or run_dir / "checkpoints") / "last.ckpt"
        why_none = "no step has been trained" if checkpoint else "callbacks.checkpoint is left out"
        print(f"kept     {last}" if last.exists() else f"kept     no checkpoint: {why_none}")
        print(f"resume   {resume_command(config, run_dir)}", flush=True)
    job = os.environ.get("SLURM_JOB_ID")
    if stop.signal.name == "SIGUSR1" and job:
        _requeue(job)


def _requeue(job: str) -> None:
    """Have SLURM start the job's script again, which resumes the run (docs/train.sbatch)."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else job
    done = False
    with contextlib.suppress(OSError):
        done = subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0
    print(f"requeue  {job}: {'asked for' if done else 'scontrol failed'}", flush=True)


def _refused_file(error: BaseException | None, run_dir: str) -> OSError | None:
    """The OSError that caused an exception, if it concerns the disk or a file in the run's folder.

    Lightning wraps the errors of its loggers, so causes are followed. An error that was being handled when another one
    occurred is not its cause: of those only an error of the disk counts.
    """
    is_cause = True
    while error is not None:
        if isinstance(error, OSError):
            name = (
                error.filename if is_cause and not isinstance(error, FileNotFoundError) else None
            )  # a missing file is a bug
            named = isinstance(name, str | bytes) and is_inside(Path(os.fsdecode(name)), Path(run_dir))
            if named or error.errno in _UNUSABLE:
                return error
        is_cause = is_cause and error.__cause__ is not None
        error = error.__cause__ or error.__context__
    return None


def _is(error: BaseException, classes: tuple[type[BaseException], ...], words: tuple[str, ...]) -> bool:
    return isinstance(error, classes) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def _out_of_memory(config: dict[str, Any], device: torch.device, memory: Mapping[str, Any]) -> str:
    if device.type == "cuda":
        held, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    else:
        held, total = psutil.Process().memory_info().rss, host_memory().total
    precision = faster_precision(cached_calibration(device), config["trainer"].get("precision"))
    return (
        f"out of memory with data.batch_size={config['data']['batch_size']} on {device.type}: {held / _GIB:.2f} GiB were "
        f"allocated of {total / _GIB:.2f}; {_held_by_a_step(memory)}try {_smaller_batch(config)}"
        + (f", or trainer.precision={precision}" if precision else "")
    )


def _held_by_a_step(memory: Mapping[str, Any]) -> str:
    """What the steps before this one held, as far as it was measured."""
    parts = memory.get("parts_bytes", {})
    if "saved" not in parts:
        return ""
    total = formatting.memory(sum(parts.values()))
    return f"a step before held {total}, {formatting.memory(parts['saved'])} of it saved by autograd; "


def _smaller_batch(config: dict[str, Any]) -> str:
    """Half of the batch size, with the samples of an update kept."""
    batch_size, accumulated = config["data"]["batch_size"], config["trainer"].get("accumulate_grad_batches") or 1
    if batch_size == 1:
        return "a smaller model"
    smaller = batch_size // 2
    batches = accumulated * -(-batch_size // smaller)
    return f"data.batch_size={smaller} with trainer.accumulate_grad_batches={batches}"
