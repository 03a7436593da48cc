"""Checks that all ranks use the same data and code, and ends all ranks together."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed
from lightning import LightningModule, Trainer

from .._lightning import child_processes, unwatched_processes
from ..errors import Interrupted, PeerLostError, UserError
from .gather import gather

_GRACE_S = 10  # for what a process does after its last step
_FAILURE_GRACE_S = 2  # for the record of a rank that fails; that rank waits longer before it prints (errors.report)


def check_agreement(values: dict[str, Any], trainer: Trainer) -> None:
    """Compare values between all ranks, once the process group exists; a difference is a UserError on all ranks."""
    values_of_rank_0, *values_of_others = gather(values, trainer.world_size)
    for rank, values_of_rank in enumerate(values_of_others, 1):
        for key, expected in values_of_rank_0.items():
            if (value := values_of_rank.get(key)) != expected:
                error = UserError(f"{key}: is {value!r} in process {rank}, and {expected!r} in process 0")
                error.reported = not trainer.is_global_zero  # rank 0 alone prints it
                raise error


def record_lost_ranks(trainer: Trainer) -> None:
    """Under gloo, which reports a lost rank, keep Lightning from killing this process, so that it can record the loss."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        unwatched_processes(trainer)


def abort_waiting(trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
    """After an error, keep Lightning from killing this process when another one fails: it may have to record or upload.

    After a RuntimeError also abort NCCL's operations: they may wait for a lost rank, and Lightning waits for them.
    """
    unwatched_processes(trainer)
    if not isinstance(exception, RuntimeError) or trainer.world_size == 1:
        return
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
        with contextlib.suppress(Exception):  # a private function of torch
            torch.distributed.distributed_c10d._abort_process_group()


@contextlib.contextmanager
def end_together(trainer: Trainer) -> Iterator[None]:
    """Wait for the processes that Lightning has started; after an error, kill them.

    Otherwise a process in a collective operation would wait for a long time for a process that has ended. A lost rank may
    have failed by itself, and gets the time to record why.
    """
    grace_s = 0
    try:
        yield
        grace_s = _GRACE_S
    except Interrupted as interrupt:  # if all ranks have agreed on it, they end by themselves
        grace_s = _GRACE_S if interrupt.agreed else _FAILURE_GRACE_S
        raise
    except PeerLostError:
        grace_s = _FAILURE_GRACE_S
        if trainer.is_global_zero and not child_processes(trainer):  # a launcher has started the other ranks
            time.sleep(_FAILURE_GRACE_S)
        raise
    finally:
        processes = unwatched_processes(trainer)
        deadline = time.monotonic() + grace_s
        try:
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also if a signal interrupts the wait
            for process in processes:
                process.kill()  # does nothing to a process that has ended
                process.wait()
