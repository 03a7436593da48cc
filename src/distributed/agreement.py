"""Ranks that train together use the same data and code, and end together."""

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
_LAST_WORDS_S = 2  # for the record of a rank that fails; it waits longer before it prints (errors.report)


def check_agreement(facts: dict[str, Any], trainer: Trainer) -> None:
    """Compare facts between all ranks, once the process group is there; a difference is a UserError on all ranks."""
    first, *others = gather(facts, trainer.world_size)
    for rank, other in enumerate(others, 1):
        for key in first:
            if other.get(key) != first[key]:
                error = UserError(f"{key}: is {other.get(key)!r} in process {rank}, and {first[key]!r} in process 0")
                error.reported = not trainer.is_global_zero  # rank 0 alone prints it
                raise error


def record_lost_ranks(trainer: Trainer) -> None:
    """Have Lightning kill this process for no lost rank where gloo reports the loss, so that it can be recorded."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        unwatched_processes(trainer)


def abort_waiting(trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
    """Have Lightning kill this process for no other one after an error: it has something to record, or to upload.

    After an error of torch abort NCCL's operations: they may wait for a lost rank, and Lightning waits for them.
    """
    unwatched_processes(trainer)
    if not isinstance(exception, RuntimeError) or trainer.world_size == 1:
        return
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
        with contextlib.suppress(Exception):  # a function that torch does not promise
            torch.distributed.distributed_c10d._abort_process_group()


@contextlib.contextmanager
def end_together(trainer: Trainer) -> Iterator[None]:
    """Wait for the processes that Lightning has started; after an error, kill them.

    Otherwise a process that waits in a collective operation for one that is gone would wait for a long time. A rank that
    was lost may have failed by itself: it gets the time to record why.
    """
    grace_s = 0
    try:
        yield
        grace_s = _GRACE_S
    except Interrupted as stop:  # where all ranks have agreed on it, they end by themselves
        grace_s = _GRACE_S if stop.agreed else _LAST_WORDS_S
        raise
    except PeerLostError:
        grace_s = _LAST_WORDS_S
        if trainer.is_global_zero and not child_processes(trainer):  # of a launcher
            time.sleep(_LAST_WORDS_S)
        raise
    finally:
        others = unwatched_processes(trainer)
        deadline = time.monotonic() + grace_s
        try:
            for process in others:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also after a signal to this process, which waits
            for process in others:
                process.kill()  # nothing where it has ended
                process.wait()
