"""RankSync: what only one rank may know, all ranks act on at the same batch, and no accelerator waits for it."""

from collections.abc import Callable, Hashable
from typing import ClassVar, Self
from weakref import WeakKeyDictionary

import lightning
import torch
import torch.distributed

from ..errors import UserError

EVERY = 2  # batches: what is contributed in one of them is known after the second next one at the latest


class RankSync:
    """Agrees between ranks on integers, each rank's own until then: the signal it has received, whether it wants a
    checkpoint.

    An exchange starts before a batch and is read after the batch. It runs on CPU tensors, in a gloo group of its own,
    while the batch is computed: no accelerator takes part in it, and all ranks read the same result at the same batch.
    The result is the maximum of all contributions, by topic. A contribution is a state and not an event: it is made
    again at every exchange until it has been acted on.

    Every second batch has an exchange. The turns are counted and not timed: ranks have clocks of their own, and a batch
    may take much longer than those before it.

    A single process reads its own contributions at once.

    Args:
        world_size: the number of ranks. Of several, all have to make the object, call `start` and `restart`, and read
            at the same places.

    Raises:
        UserError: if the ranks cannot connect.
    """

    _of: ClassVar[WeakKeyDictionary[lightning.Trainer, "RankSync"]] = WeakKeyDictionary()

    def __init__(self, world_size: int):
        self._topics: dict[str, Callable[[], int]] = {}
        self._agreed: dict[str, int] = {}
        self._batch: Hashable = None
        self._work: torch.distributed.Work | None = None
        self._group = _gloo_group() if world_size > 1 else None
        self.restart()

    @classmethod
    def of(cls, trainer: lightning.Trainer) -> Self:
        """The one that the callbacks of a trainer share, until it is closed."""
        if trainer not in cls._of:
            cls._of[trainer] = cls(trainer.world_size)
        return cls._of[trainer]

    @classmethod
    def close(cls, trainer: lightning.Trainer) -> None:
        """Leave nothing behind, also if other ranks are gone: an exchange that is going on is not waited for."""
        sync = cls._of.pop(trainer, None)
        if sync is not None and sync._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(sync._group)

    def contribute(self, topic: str, number: Callable[[], int]) -> None:
        """Have `number()`, from 0 for nothing, contributed to every exchange."""
        self._topics[topic] = number

    def restart(self) -> None:
        """Batches of another kind follow: the next one has an exchange."""
        self._finish()
        self._batches = 0

    def start(self, batch: Hashable) -> None:
        """A batch begins. Several callbacks may say so of the same one."""
        if self._group is None or batch == self._batch:
            return
        self._finish()
        self._batch, self._agreed = batch, {}
        if self._batches % EVERY == 0:
            self._work = self._exchange([self._topics[topic]() for topic in sorted(self._topics)])
        self._batches += 1

    def agreed(self, topic: str) -> int:
        """After a batch: the maximum of what all ranks contributed to its exchange; 0 if it had none."""
        if self._group is None:
            return self._topics[topic]()
        self._finish()
        return self._agreed.get(topic, 0)

    def maximum(self, number: int) -> int:
        """The greatest of all ranks' numbers, waited for; between two batches."""
        if self._group is None:
            return number
        self._finish()
        self._exchange([number]).wait()
        return int(self._values)

    def _exchange(self, numbers: list[int]) -> torch.distributed.Work:
        self._values = torch.tensor(numbers, device="cpu")
        operation = torch.distributed.ReduceOp.MAX
        return torch.distributed.all_reduce(self._values, operation, group=self._group, async_op=True)

    def _finish(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        self._agreed = dict(zip(sorted(self._topics), self._values.tolist(), strict=True))


def _gloo_group() -> torch.distributed.ProcessGroup:
    try:
        return torch.distributed.new_group(backend="gloo")
    except RuntimeError as error:
        raise UserError(
            f"trainer.devices: the processes cannot connect by gloo ({error}); set GLOO_SOCKET_IFNAME to the network "
            f"interface between them"
        ) from error
