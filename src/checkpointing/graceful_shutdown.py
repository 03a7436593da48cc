"""GracefulShutdown: on a termination signal a run finishes its step, saves a checkpoint, and ends."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self

from lightning import LightningModule, Trainer
from typing_extensions import override

from .._lightning import after_batch, leave_signals_alone
from .._system import STOPPING, signals_named
from ..distributed.rank_sync import RankSync, SyncsRanks
from ..errors import Interrupted
from .callback import Checkpoints
from .signals import forces_exit, handled_signals, redirect_closed_terminals, terminal_streams

SIGNALS = (*STOPPING, *signals_named("SIGUSR1"))
_TOPIC = "signal"


class GracefulShutdown(SyncsRanks):
    """Ends a run on SIGINT (Ctrl-C), SIGTERM, SIGHUP (unless started by nohup), SIGUSR1 (which SLURM sends before it
    requeues a job) or, on Windows, SIGBREAK (Ctrl-Break).

    Use the object as a context, which installs the signal handlers, and as the last callback of the trainer, so that the
    other callbacks have seen the step. After the current step it saves a checkpoint and raises `Interrupted`. Outside of
    training steps it raises `Interrupted` at once; before a validation a checkpoint has just been saved. A second signal
    ends the process at once; the last checkpoint stays intact.

    All ranks end after the same step, whichever rank received the signal: at the latest after the second step that
    follows. Several ranks finish a validation or a test first.

    Processes that are forked within the context, such as a loader's workers, leave the signals to the run's own process;
    SIGTERM ends them, as it does by default. A worker that a signal has ended does not make the step fail.

    Args:
        before_exit: called with the signal's number before a second signal ends the process; must not take long.
    """

    def __init__(self, before_exit: Callable[[int], None] = lambda number: None):
        self.before_exit = before_exit
        self._signal: int | None = None  # the first one that this process has received
        self._received_at = 0.0
        self._is_deferring = False  # whether a signal waits until the ranks agree on it
        self._previous_handlers: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        self._pid = os.getpid()
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
        if self._previous_handlers:  # ours are installed in place of Lightning's
            leave_signals_alone(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_deferring(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._is_deferring = True  # again, after a validation
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if number := RankSync.of(trainer).agreed(_TOPIC):
            after_batch(trainer, lambda: _save_and_interrupt(trainer, number))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_deferring(trainer)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Every callback's `on_validation_start` has run before this hook, so that a checkpoint has just been saved.
        if self._is_deferring and trainer.world_size == 1:
            self._stop_deferring(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:  # a single process may end at once; several processes have to agree
            self._start_deferring(trainer)

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
        RankSync.of(trainer).contribute(_TOPIC, lambda: self._signal or 0)

    def _stop_deferring(self, trainer: Trainer) -> None:
        number = RankSync.of(trainer).maximum(self._signal or 0)
        self._is_deferring = False
        if number := number or self._signal or 0:  # a signal may have reached this rank since
            raise Interrupted(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:  # the parent process ends a worker by it
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        redirect_closed_terminals(self._terminals)
        now = time.monotonic()
        if self._signal is not None:
            if forces_exit(number, now - self._received_at):
                self.before_exit(number)
                os._exit(128 + number)
            return
        self._signal, self._received_at = number, now
        for sigchld in signals_named("SIGCHLD"):  # torch's handler makes the step fail if a worker has ended
            self._previous_handlers[sigchld] = signal.signal(sigchld, lambda number, frame: None)
        if not self._is_deferring:
            raise Interrupted(number, agreed=False)


def _save_and_interrupt(trainer: Trainer, number: int) -> NoReturn:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, Checkpoints):
            callback.save(trainer)
    raise Interrupted(number)
