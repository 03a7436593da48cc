"""The rendezvous of the processes that torchrun or srun has started: the run's folder, and data that one prepares for all."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..errors import UserError, in_one_line
from ..ranks import Rank, current

_TIMEOUT = timedelta(minutes=5)  # for all processes to be started
_store: Any = None  # kept, because rank 0 serves it to the others


def publish(facts: dict[str, Any]) -> None:
    """On rank 0 of several launched processes, let the others `receive` the facts; elsewhere do nothing."""
    rank = current()
    if rank.launcher and rank.world_size > 1:
        _rendezvous_store(rank).set("run", json.dumps(facts))


def receive() -> dict[str, Any]:
    """Wait for what rank 0 publishes; UserError if it is missing, or ends before."""
    return json.loads(_get(_rendezvous_store(current()), "run"))


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


def use_own_rendezvous_store() -> None:
    """Give the processes of a torchrun restart (`--max-restarts`) a separate rendezvous store.

    The store of torchrun's agent outlives an attempt. It still holds the addresses of the failed processes, and torch's
    process group does not start from those.
    """
    global _store
    rank = current()
    if rank.launcher != "torchrun" or rank.world_size == 1 or _attempt() == "0":
        return
    agent_store = _rendezvous_store(rank)
    if rank.rank == 0:
        from torch.distributed import TCPStore

        own = TCPStore(
            os.environ["MASTER_ADDR"], 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
        agent_store.set("port", str(own.port))
        port, _store = str(own.port), own
    else:
        port, _store = _get(agent_store, "port"), None
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _attempt() -> str:
    """How often torchrun has restarted the processes."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _get(store: Any, key: str) -> str:
    try:
        return store.get(key).decode()
    except RuntimeError as error:  # torch's DistError is one
        raise UserError(f"the first process has not published the run's folder: {error}") from error


def _rendezvous_store(rank: Rank) -> Any:
    """Torch's store at the address where Lightning's process group will meet, with a prefix for this attempt."""
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
    return PrefixStore(f"batchscope/{_attempt()}", _store)
