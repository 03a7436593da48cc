"""GracefulShutdown: on a termination signal a run finishes its step, saves a checkpoint, and ends."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from lightning import LightningModule, Trainer
from typing_extensions import override

from .._lightning import leave_signals_alone
from ..distributed.rank_sync import RankSync, SyncsRanks
from ..errors import Interrupted
from .callback import Checkpoints
from .signals import STOPPING, forces_exit, handled_signals, redirect_closed_terminals, terminal_streams

SIGNALS = (*STOPPING, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
_TOPIC = "signal"


class GracefulShutdown(SyncsRanks):
    """Ends a run on SIGINT (Ctrl-C), SIGTERM, SIGHUP (unless started by nohup) or SIGUSR1 (which SLURM sends before it
    requeues a job).

    Use it as a context, which installs the signal handlers, and as the last callback of the trainer, so that the other
    callbacks have seen the step. After the current step it saves a checkpoint and raises `Interrupted`. Outside of
    training it raises at once. A second signal ends the process at once; the checkpoint before it is intact.

    All ranks end after the same step, whichever rank received the signal: at the latest after the second step that
    follows. In validation and test, the steps are the batches.

    Args:
        before_exit: called before the process ends at once; it must not take long.
    """

    def __init__(self, before_exit: Callable[[int], None] = lambda number: None):
        self.before_exit = before_exit
        self._received: int | None = None
        self._received_at = 0.0
        self._is_deferring = False  # a signal waits for the end of a batch
        self._common_batches = 0  # of an evaluation, still to come on every rank
        self._previous_handlers: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.getsignal(number) for number in handled_signals(SIGNALS)}
            self._terminals = terminal_streams()
        for number in self._previous_handlers:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._previous_handlers:  # there are handlers: nobody needs Lightning's
            leave_signals_alone(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_deferring(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if number := RankSync.of(trainer).agreed(_TOPIC):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoints):
                    callback.save(trainer)
            raise Interrupted(number)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_deferring(trainer)

    @override  # a checkpoint was saved before the validation
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_deferring:
            self._start_evaluation(trainer, trainer.num_val_batches)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_deferring and self._common_batches:
            RankSync.of(trainer).start(("evaluation", self._common_batches))

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_deferring and self._common_batches:
            self._common_batches -= 1
            if number := RankSync.of(trainer).agreed(_TOPIC):
                raise Interrupted(number)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_deferring:
            RankSync.of(trainer).restart()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:  # one process may end at once; several have to agree
            self._start_deferring(trainer)
            self._start_evaluation(trainer, trainer.num_test_batches)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_deferring:
            self._stop_deferring(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._is_deferring = False
        super().on_exception(trainer, pl_module, exception)

    def _start_deferring(self, trainer: Trainer) -> None:
        self._is_deferring = True
        RankSync.of(trainer).contribute(_TOPIC, lambda: self._received or 0)

    def _stop_deferring(self, trainer: Trainer) -> None:
        number = RankSync.of(trainer).maximum(self._received or 0)
        self._is_deferring = False
        if number := number or self._received or 0:  # a signal may have reached this rank since
            raise Interrupted(number)

    def _start_evaluation(self, trainer: Trainer, batches: float | list[int | float]) -> None:
        """Find the number of batches that all ranks have: they agree during these.

        Where a length is unknown (infinite), several ranks agree only at the end of the evaluation.
        """
        own = sum(batches) if isinstance(batches, list) else batches
        unknown = 0 if trainer.world_size > 1 else sys.maxsize
        sync = RankSync.of(trainer)
        sync.restart()
        self._common_batches = -sync.maximum(-(unknown if own == float("inf") else int(own)))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        redirect_closed_terminals(self._terminals)
        now = time.monotonic()
        if self._received is not None:
            if forces_exit(number, now - self._received_at):
                self.before_exit(number)
                os._exit(128 + number)
            return
        self._received, self._received_at = number, now
        if not self._is_deferring:
            raise Interrupted(number, agreed=False)
