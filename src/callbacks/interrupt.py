"""Interrupts: a run that is told to end finishes its step, keeps a checkpoint, and ends."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from ..signals import STOPPING, heeded, insists, leave_lost, terminals
from .checkpoint import AGREE_EVERY, Checkpoints

SIGNALS = (*STOPPING, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))


class Interrupted(SystemExit):
    """The run was told to end.

    Args:
        number: of the signal; the exit code is 128 more, as shells have it.
    """

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


class Interrupts(Callback):
    """Ends a run on Ctrl-C, SIGTERM, SIGHUP (unless started by nohup) or SIGUSR1 (which SLURM sends before it requeues
    a job).

    As a context it listens to the signals, as a callback it acts on them: after the present step a checkpoint is
    written, and `Interrupted` leaves the trainer. Outside of training the exception comes at once. A second signal
    ends the process at once, with the checkpoint before it intact. The last of a trainer's callbacks, so that the
    others have seen the step.

    Args:
        leaving: called before the process ends at once; it must not take long.
    """

    def __init__(self, leaving: Callable[[int], None] = lambda number: None):
        self.leaving = leaving
        self._told_by: int | None = None
        self._told_at = 0.0
        self._training = False
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in heeded(SIGNALS)}
            self._terminals = terminals()
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """From now on a signal waits for the end of the step; Lightning's handlers, just set, are set aside."""
        self._training = True
        self._listen()

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep a checkpoint and end, if told to."""
        if self._told(trainer, batch_idx):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoints):
                    callback.save(trainer)
            raise Interrupted(self._told_by)

    def on_validation_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End, if told to: a checkpoint was written before the validation."""
        if self._training and self._told(trainer, batch_idx):
            raise Interrupted(self._told_by)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Told after the last step."""
        self._training = False
        if self._told_by is not None:
            raise Interrupted(self._told_by)

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Lightning has set its handlers again."""
        self._listen()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """There is no step to wait for."""
        self._training = False

    def _listen(self) -> None:
        for number in self._before:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        leave_lost(self._terminals)
        now = time.monotonic()
        if self._told_by is not None:
            if insists(number, now - self._told_at):
                self.leaving(number)
                os._exit(128 + number)
            return
        self._told_by, self._told_at = number, now
        if not self._training:
            raise Interrupted(number)

    def _told(self, trainer: lightning.Trainer, batch_idx: int) -> bool:
        """Whether to end now; several processes agree on it."""
        if trainer.world_size > 1 and (batch_idx + 1) % AGREE_EVERY == 0:
            told = torch.tensor(self._told_by or 0, device=trainer.strategy.root_device)
            self._told_by = int(trainer.strategy.reduce(told, reduce_op="max")) or None
            return self._told_by is not None
        return self._told_by is not None and trainer.world_size == 1
