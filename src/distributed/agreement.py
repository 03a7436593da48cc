"""Ranks that train together use the same options, data and code, and end together."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from .._lightning import child_processes
from ..errors import Interrupted, PeerLostError, UserError
from ..options.purpose import PLACES, purpose_of
from ..options.tree import flatten
from ..records.read import FILE
from .gather import gather

_UNSEEN_S = 60  # for a file that another machine has written
_GRACE_S = 10  # for what a process does after its last step
_LAST_WORDS_S = 2  # for the record of a rank that fails; it waits longer before it prints (errors.report)


class Agreement(Callback):
    """Compares facts between all ranks before training starts; a difference is a UserError on all ranks.

    All ranks have to see the record that rank 0 has begun in `run_dir`. `facts` is called when training starts.
    """

    def __init__(self, run_dir: Path, facts: Callable[[], dict[str, Any]]):
        self.run_dir = run_dir
        self.facts = facts

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The first hook after the process group has been set up.
        if stage != "fit" or trainer.world_size == 1:
            return
        facts = self.facts()
        own = {
            "host": socket.gethostname(),
            "sees_record": _sees(self.run_dir / FILE),
            "facts": {key: value for key, value in flatten(facts) if not _is_place(key, facts["config"])},
        }
        if difference := _first_difference(gather(own, trainer.world_size), self.run_dir):
            error = UserError(difference)
            error.reported = not trainer.is_global_zero  # rank 0 alone prints it
            raise error


def _sees(path: Path) -> bool:
    """Whether a file is there, or soon will be: an NFS client remembers for up to a minute that it was not."""
    deadline = time.monotonic() + _UNSEEN_S
    while not path.is_file():
        if time.monotonic() >= deadline:
            return False
        time.sleep(1)
    return True


def _is_place(key: str, config: dict[str, Any]) -> bool:
    """Whether a fact is an option for a folder or file, which may lie elsewhere on each machine."""
    option = key.removeprefix("config.")
    return option != key and purpose_of(option, config) in PLACES


def _first_difference(known: list[dict[str, Any]], run_dir: Path) -> str:
    first = known[0]["facts"]
    for rank, other in enumerate(known):
        who = f"process {rank} (on {other['host']})"
        if not other["sees_record"]:
            return f"hydra.run.dir: {who} does not see {run_dir}; all machines have to share the file system it is on"
        there = other["facts"]
        for key in dict.fromkeys([*first, *there]):
            if first.get(key) != there.get(key):
                option = key.removeprefix("config.")
                return f"{option}: is {there.get(key)!r} in {who}, and {first.get(key)!r} in process 0"
    return ""


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
    except Interrupted:  # all ranks have agreed on it, and end by themselves
        grace_s = _GRACE_S
        raise
    except PeerLostError:
        grace_s = _LAST_WORDS_S
        if trainer.is_global_zero and not child_processes(trainer):  # of a launcher
            time.sleep(_LAST_WORDS_S)
        raise
    finally:
        others = [*child_processes(trainer)]
        child_processes(trainer).clear()  # Lightning's watcher of this list kills this process when one of them fails
        deadline = time.monotonic() + grace_s
        try:
            for process in others:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also after a signal to this process, which waits
            for process in others:
                process.kill()  # nothing where it has ended
                process.wait()
