"""Several processes train as one: they see the same data by the same options, and they end together."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch.distributed
from lightning.pytorch.callbacks import Callback

from ..errors import Interrupted, UserError
from ..options.tree import flatten
from ..records.read import FILE

_GRACE_S = 10  # for what a process does after its last step
# What may differ between machines, for it says where something lies.
_PLACES = ("config.run_dir", "config.resume", "config.data.root")


class Agreement(Callback):
    """Before anything is trained, compares what every process of a run knows with what the first one knows.

    Args:
        run_dir: where the first process has begun its record; the others have to see it.
        facts: what all have to share; plain containers.

    Raises:
        UserError: in all processes, naming the first one that differs and in what; the first process tells it.
    """

    def __init__(self, run_dir: Path, facts: dict[str, Any]):
        self.run_dir = run_dir
        self.facts = facts

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """The first moment at which the processes can talk to each other."""
        if stage != "fit" or trainer.world_size == 1:
            return
        own = {
            "host": socket.gethostname(),
            "sees": (self.run_dir / FILE).is_file(),
            "facts": dict(flatten(self.facts)),
        }
        known: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(known, own)
        difference = _first_difference(known, self.run_dir)
        if difference:
            error = UserError(difference)
            error.reported = not trainer.is_global_zero
            raise error


def _first_difference(known: list[dict[str, Any]], run_dir: Path) -> str:
    first = known[0]["facts"]
    for rank, other in enumerate(known):
        who = f"process {rank} (on {other['host']})"
        if not other["sees"]:
            return f"hydra.run.dir: {who} does not see {run_dir}; all machines have to share the file system it is on"
        there = other["facts"]
        for key in dict.fromkeys([*first, *there]):
            if first.get(key) != there.get(key) and key not in _PLACES:
                option = key.removeprefix("config.")
                return f"{option}: is {there.get(key)!r} in {who}, and {first.get(key)!r} in process 0"
    return ""


@contextlib.contextmanager
def end_together(trainer: lightning.Trainer) -> Iterator[None]:
    """Leave no process that Lightning has started, however what is done within ends.

    One that waits in a collective operation for a process that is gone would wait for long.
    """
    try:
        yield
    except Interrupted:  # they have agreed on it, and end by themselves
        _wait_for_others(trainer, _GRACE_S)
        raise
    except BaseException:
        _wait_for_others(trainer, 0)
        raise
    _wait_for_others(trainer, _GRACE_S)


def _wait_for_others(trainer: lightning.Trainer, seconds: float) -> None:
    started = getattr(trainer.strategy.launcher, "procs", [])
    others = list(started)
    started.clear()  # Lightning watches this list, and kills this process when one of them ends with another code than 0
    for process in others:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
