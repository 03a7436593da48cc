"""GracefulShutdown: a run that is told to end finishes its step, keeps a checkpoint, and ends."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import lightning
from lightning.pytorch.callbacks import Callback

from ..distributed.rank_sync import RankSync
from ..errors import Interrupted
from .callback import Checkpoints
from .signals import STOPPING, forces_exit, handled_signals, leave_lost, terminals

SIGNALS = (*STOPPING, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
_TOPIC = "signal"


class GracefulShutdown(Callback):
    """Ends a run on Ctrl-C, SIGTERM, SIGHUP (unless started by nohup) or SIGUSR1 (which SLURM sends before it requeues
    a job).

    As a context it listens to the signals, as a callback it acts on them: after the present step a checkpoint is
    written, and `Interrupted` leaves the trainer. Outside of training the exception comes at once. A second signal
    ends the process at once, with the checkpoint before it intact. The last of a trainer's callbacks, so that the
    others have seen the step.

    Several ranks end after the same step, whichever of them the signal reached: the third one at the latest, that in
    which it came included. The same holds in validations and tests, whose batches are the steps.

    Args:
        leaving: called before the process ends at once; it must not take long.
    """

    def __init__(self, leaving: Callable[[int], None] = lambda number: None):
        self.leaving = leaving
        self._received: int | None = None
        self._received_at = 0.0
        self._waits = False  # a signal waits for the end of a batch
        self._common_batches = 0  # of an evaluation, still to come on every rank
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in handled_signals(SIGNALS)}
            self._terminals = terminals()
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_sanity_check_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Lightning has just set its handlers, which call the other ranks from within a signal."""
        self._listen()

    # --- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """From now on a signal waits for the end of the step; Lightning's handlers, just set, are set aside."""
        self._begin(trainer)
        if self._before:
            # Before every batch Lightning asks all ranks, on the device and waiting for it, whether its own handler of
            # SIGTERM was called; that handler is set aside.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Ask the other ranks."""
        RankSync.of(trainer).start(trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep a checkpoint and end, if any rank was told to."""
        number = RankSync.of(trainer).agreed(_TOPIC)
        if number:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoints):
                    callback.save(trainer)
            raise Interrupted(number)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """A signal after the last step."""
        self._end(trainer)

    # --- validation and test -----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """See how many batches all ranks have."""
        if self._waits:
            self._begin_evaluation(trainer, trainer.num_val_batches)

    def on_validation_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, *indices: int
    ) -> None:
        """Ask the other ranks."""
        self._begin_evaluation_batch(trainer)

    def on_validation_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, *indices: int
    ) -> None:
        """End, if any rank was told to: a checkpoint was written before the validation."""
        self._end_evaluation_batch(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Training goes on."""
        if self._waits:
            RankSync.of(trainer).restart()

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Lightning has set its handlers again. One process may end at once; several have to agree."""
        self._listen()
        if trainer.world_size > 1:
            self._begin(trainer)
            self._begin_evaluation(trainer, trainer.num_test_batches)

    def on_test_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, *indices: int
    ) -> None:
        """Ask the other ranks."""
        self._begin_evaluation_batch(trainer)

    def on_test_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, *indices: int
    ) -> None:
        """End, if any rank was told to."""
        self._end_evaluation_batch(trainer)

    def on_test_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """A signal after the last batch."""
        if self._waits:
            self._end(trainer)

    # --- the end -----------------------------------------------------------------------------------------------------

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """There is no step to wait for."""
        self._waits = False
        RankSync.close(trainer)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Leave no process group."""
        RankSync.close(trainer)

    def _begin(self, trainer: lightning.Trainer) -> None:
        self._waits = True
        self._listen()
        RankSync.of(trainer).contribute(_TOPIC, lambda: self._received or 0)

    def _end(self, trainer: lightning.Trainer) -> None:
        number = RankSync.of(trainer).maximum(self._received or 0)
        self._waits = False
        if number or self._received:  # this process's may have come since
            raise Interrupted(number or self._received)

    def _begin_evaluation(self, trainer: lightning.Trainer, batches: float | list[int | float]) -> None:
        """Ranks may have different numbers of batches: they agree as long as all have some. Where a number is not known
        beforehand (infinity), several ranks do not agree before the evaluation's end."""
        own = sum(batches) if isinstance(batches, list) else batches
        unknown = 0 if trainer.world_size > 1 else sys.maxsize
        sync = RankSync.of(trainer)
        sync.restart()
        self._common_batches = -sync.maximum(-(unknown if own == float("inf") else int(own)))

    def _begin_evaluation_batch(self, trainer: lightning.Trainer) -> None:
        if self._waits and self._common_batches:
            RankSync.of(trainer).start(("evaluation", self._common_batches))

    def _end_evaluation_batch(self, trainer: lightning.Trainer) -> None:
        if not self._waits or not self._common_batches:
            return
        self._common_batches -= 1
        number = RankSync.of(trainer).agreed(_TOPIC)
        if number:
            raise Interrupted(number)

    def _listen(self) -> None:
        for number in self._before:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        leave_lost(self._terminals)
        now = time.monotonic()
        if self._received is not None:
            if forces_exit(number, now - self._received_at):
                self.leaving(number)
                os._exit(128 + number)
            return
        self._received, self._received_at = number, now
        if not self._waits:
            raise Interrupted(number, agreed=False)
