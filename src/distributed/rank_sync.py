"""RankSync: all ranks read at the same batch what any rank contributes, without waiting for an accelerator."""

from collections.abc import Callable
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from ..errors import UserError

# Batches between two exchanges: all ranks read a contribution at the latest after the second batch from now.
EXCHANGE_INTERVAL = 2


class RankSync:
    """Agrees between ranks on integers, such as the signal that a rank has received, or whether it wants a checkpoint.

    An exchange starts before every second batch, and its result is read after the batch. The exchange runs on CPU tensors
    in a separate gloo group while the batch is computed, so that no accelerator waits. All ranks read the same result at
    the same batch: by topic, the maximum of all contributions. A contribution is a state and not an event: it is
    repeated at every exchange until somebody acts on it. Exchanges follow the count of batches and not the clock, because
    clocks differ between ranks, and one batch may take much longer than another.

    A single process reads its own contributions at once. Several ranks have to create the object, call `start`, and read
    results at the same points of their programs. A UserError says that the ranks cannot connect.
    """

    _syncs: ClassVar[WeakKeyDictionary[Trainer, "RankSync"]] = WeakKeyDictionary()

    def __init__(self, world_size: int):
        self._contributions: dict[str, Callable[[], int]] = {}  # by topic
        self._maxima: dict[str, int] = {}  # by topic, over all ranks
        self._batch: int | None = None
        self._work: torch.distributed.Work | None = None
        self._group = _gloo_group() if world_size > 1 else None

    @classmethod
    def of(cls, trainer: Trainer) -> "RankSync":
        """Return the RankSync that a trainer's callbacks share until it is closed."""
        if trainer not in cls._syncs:
            cls._syncs[trainer] = cls(trainer.world_size)
        return cls._syncs[trainer]

    @classmethod
    def close(cls, trainer: Trainer) -> None:
        """Destroy the group, without waiting for an exchange in progress, because other ranks may have ended."""
        sync = cls._syncs.pop(trainer, None)
        if sync is not None and sync._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(sync._group)

    def contribute(self, topic: str, number: Callable[[], int]) -> None:
        """Contribute `number()` to every exchange from now on; 0 stands for no contribution."""
        self._contributions[topic] = number

    def start(self, batch: int) -> None:
        """Start the exchange of batch number `batch`, if it has one; several callbacks may call this for the same batch."""
        if self._group is None or batch == self._batch:
            return
        self._finish()
        self._batch, self._maxima = batch, {}
        if batch % EXCHANGE_INTERVAL == 0:
            self._work = self._exchange([self._contributions[topic]() for topic in sorted(self._contributions)])

    def agreed(self, topic: str) -> int:
        """After a batch, return the maximum of all ranks' contributions to its exchange; 0 if the batch had none."""
        if self._group is None:
            return self._contributions[topic]()
        self._finish()
        return self._maxima.get(topic, 0)

    def maximum(self, number: int) -> int:
        """Between two batches, wait for all ranks and return the maximum of their numbers."""
        if self._group is None:
            return number
        self._finish()
        self._exchange([number]).wait()
        return int(self._values)

    def _exchange(self, numbers: list[int]) -> torch.distributed.Work:
        """Start to reduce `numbers` to their maxima over all ranks, which are then in `_values`."""
        self._values = torch.tensor(numbers, device="cpu")
        work = torch.distributed.all_reduce(
            self._values, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
        )
        return cast(torch.distributed.Work, work)

    def _finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._maxima = dict(zip(sorted(self._contributions), self._values.tolist(), strict=True))


class SyncsRanks(Callback):
    """Starts the exchanges of the trainer's RankSync with the training batches, and closes the RankSync at the end."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        RankSync.of(trainer).start(trainer.fit_loop.epoch_loop.total_batch_idx)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        RankSync.close(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        RankSync.close(trainer)


def _gloo_group() -> torch.distributed.ProcessGroup:
    try:
        return cast(torch.distributed.ProcessGroup, torch.distributed.new_group(backend="gloo"))
    except RuntimeError as error:
        raise UserError(
            f"trainer.devices: the processes cannot connect by gloo ({error}); set GLOO_SOCKET_IFNAME to the network "
            f"interface between them"
        ) from error
