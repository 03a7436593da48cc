"""What the first process of a run decides, or prepares, for all.

Ranks that Lightning starts read it in their environment; others meet at the store of torch's process group.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import yaml

from ..errors import UserError, in_one_line
from ..ranks import Rank, current

_TIMEOUT = timedelta(minutes=5)  # for all processes to be started
_store: Any = None  # kept, because rank 0 serves it to the others


def of_first(key: str, decide: Callable[[], Any]) -> Any:
    """What the first process decides, in plain values; the others wait for it. UserError if it is missing, or ends before."""
    rank, name = current(), f"BATCHSCOPE_FIRST_{key}"
    if rank.rank and rank.launcher:
        try:
            return yaml.safe_load(_rendezvous_store(rank).get(key))
        except RuntimeError as error:  # torch's DistError is one
            raise UserError(f"the first process has not said what the run is: {error}") from error
    if rank.rank and name in os.environ:  # Lightning has started this process
        return yaml.safe_load(os.environ[name])
    decided = decide()
    if rank.launcher and rank.world_size > 1:
        _rendezvous_store(rank).set(key, yaml.safe_dump(decided))
    elif not rank.launcher:
        os.environ[name] = yaml.safe_dump(decided)
    return decided


def once_for_all(prepare: Callable[[], None], trainer: Any, on_each_machine: bool) -> None:
    """Call `prepare` in the first process, or the first one of each machine; the others wait, and fail if it does."""
    rank, machine = current(), trainer.node_rank if on_each_machine else 0
    if not rank.launcher or rank.world_size == 1:
        if not rank.rank:  # has prepared before Lightning starts the others
            prepare()
        return
    store, key = _rendezvous_store(rank), f"prepared {machine}"
    if (trainer.node_rank, trainer.local_rank) == (machine, 0):
        try:
            prepare()
        except BaseException:
            store.set(key, "failed")
            raise
        store.set(key, "done")
        return
    try:
        while not store.check([key]):  # as long as a download takes; signals are handled meanwhile
            time.sleep(0.1)
        failed = store.get(key) == b"failed"
    except RuntimeError:  # the process has ended, and the store with it
        failed = True
    if failed:
        error = UserError("data: another process could not prepare them")
        error.reported = True  # by that process
        raise error


def _rendezvous_store(rank: Rank) -> Any:
    """Torch's store at the address where Lightning's process group will meet, with a prefix of ours."""
    global _store
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
    from torch.distributed import PrefixStore, rendezvous

    if _store is None:
        environment = TorchElasticEnvironment() if rank.launcher == "torchrun" else SLURMEnvironment()
        address = f"{environment.main_address}:{environment.main_port}"
        try:
            _store, *_ = next(rendezvous(f"tcp://{address}", rank.rank, rank.world_size, timeout=_TIMEOUT))
        except RuntimeError as error:  # torch's DistError is one
            raise UserError(
                f"the {rank.world_size} processes do not meet at {address}: {in_one_line(error)}"
            ) from error
    return PrefixStore("batchscope", _store)
