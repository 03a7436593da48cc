"""Decisions and preparations of a run's first process, for all processes.

Ranks that Lightning starts read a decision from their environment; other ranks read it from a store of torch's rendezvous.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import yaml

from ..errors import UserError, in_one_line
from ..ranks import Rank, current_rank

_TIMEOUT = timedelta(minutes=5)  # until all processes have started
_store: Any = None  # kept alive, because rank 0 serves the store to the other ranks


def decide_in_first_rank(key: str, decide: Callable[[], Any]) -> Any:
    """Return `decide()` of the first process, in plain values; other processes wait. UserError if the first one is lost."""
    rank, name = current_rank(), f"BATCHSCOPE_FIRST_{key}"
    if rank.rank and rank.launcher:
        try:
            return yaml.safe_load(_rendezvous_store(rank).get(key))
        except RuntimeError as error:  # torch's DistError is one
            raise UserError(f"the first process has not said what the run is: {error}") from error
    if rank.rank and name in os.environ:  # Lightning has started this process
        return yaml.safe_load(os.environ[name])
    decision = decide()
    if rank.launcher and rank.world_size > 1:
        _rendezvous_store(rank).set(key, yaml.safe_dump(decision))
    elif not rank.launcher:
        os.environ[name] = yaml.safe_dump(decision)
    return decision


def prepare_once(prepare: Callable[[], None], trainer: Any, on_each_machine: bool) -> None:
    """Call `prepare` in the first process of the run or of each machine; the others wait, and fail if `prepare` fails."""
    rank, machine = current_rank(), trainer.node_rank if on_each_machine else 0
    if not rank.launcher or rank.world_size == 1:
        if not rank.rank:  # rank 0 prepares before Lightning starts the other ranks
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
        while not store.check([key]):  # without a timeout, for a download may be long; signals are handled meanwhile
            time.sleep(0.1)
        has_failed = store.get(key) == b"failed"
    except RuntimeError:  # the process that serves the store has ended
        has_failed = True
    if has_failed:
        error = UserError("data: another process could not prepare the data")
        error.reported = True  # by that process
        raise error


def _rendezvous_store(rank: Rank) -> Any:
    """Return torch's store at the address where Lightning's process group will meet, with a prefix of ours."""
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
