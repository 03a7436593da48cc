"""LoopEvents: what Lightning's training loop does with a batch becomes marks of its parts, and calls of a FitListener.

No other file knows Lightning's hooks and actions of a batch. One batch, as the loop announces it:

    train_dataloader_next → on_train_batch_start → run_training_batch (optimizer_step (training_step, backward)) → …_end

Where a module optimises by hand, its training_step has the backward passes and the optimizer_steps, each with a closure or without.
The innermost part has the time. Those of an epoch are within run_training_epoch, which begins with the loader's `iter`.
"""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ._never_raise import never_raise
from ._profiler_hook import ProfilerHook
from ._timer import PAUSE, StepTimer, add_timer

if TYPE_CHECKING:
    from ._fit_time import FitTimer

_REQUEST = "train_dataloader_next"
# Training on a batch: it begins after on_train_batch_start, where modes of other callbacks may begin.
_TRAINING = "run_training_batch"
_EPOCH = "run_training_epoch"
_UPDATE = "optimizer_step"
# The first profiled action of a validation between two updates; the validation ends with on_validation_end.
_VALIDATION = "on_validation_model_zero_grad"
# Lightning's profiler actions, by the last part of their names → the part of the step that the action is.
_PARTS = {
    "on_before_batch_transfer": "data_wait",  # a user's hooks around the copy prepare the batch, as a loader does
    "on_after_batch_transfer": "data_wait",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": PAUSE,
}


class FitListener:
    """Is told what happens to each batch of a fit, whose parts are marked on its timer.

    A batch is `begin_batch`, `count_batch`, `begin_training`, `end_backward`, `end_batch`. A step that asks for its batch
    itself begins with its training, and its batch is counted before `end_batch`; one that is None is not counted.

    Attributes:
        timer: of its steps.
        fit_time: where the time of the fit goes.
    """

    def __init__(self, timer: StepTimer, fit_time: "FitTimer"):
        self.timer, self.fit_time = timer, fit_time

    def begin_batch(self) -> None:
        """A batch is asked for; begins it on the timer, where the one before ends."""
        self.timer.begin_batch()

    def count_batch(self, trainer: Trainer, batch: Any) -> None:
        """It has come."""

    def begin_training(self) -> None:
        """Its step begins."""

    def end_backward(self) -> None:
        """Its backward pass is over."""

    def end_batch(self, trainer: Trainer) -> None:
        """It was trained, and Lightning has counted its update, if it ended one; says so to the timer.

        Its time goes on until the next batch begins, a validation or a checkpoint comes, or the epoch ends.
        """
        self.timer.end_batch(trainer.global_step)

    def stop_recording(self) -> None:
        """A validation or a checkpoint follows, or the end of an epoch."""

    def flush(self, trainer: Trainer) -> None:
        """The step has ended for a while."""


class LoopEvents(Callback):
    """Tells a FitListener of each batch, from `listen` on, while it measures. An exception in the listener disables it.

    Attributes:
        is_measuring: whether the steps of a fit are being measured.
        began: when the fit began, by `time.perf_counter()`; None if this callback was added later.
    """

    is_measuring = False
    _listener: FitListener
    _timer: StepTimer
    began: float | None = None
    _hook: ProfilerHook | None = None
    _is_training = False
    _has_begun = False  # whether a batch has begun that has not ended
    _is_counted = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = time.perf_counter()

    def listen(self, trainer: Trainer, listener: FitListener) -> None:
        """Begin to tell of the batches of a fit."""
        self._listener, self._timer = listener, listener.timer
        add_timer(trainer, listener.timer)
        self.is_measuring, self._is_training, self._has_begun, self._is_counted = True, False, False, False
        actions = {name: (partial(self._enter, part), partial(self._leave, part)) for name, part in _PARTS.items()}
        actions |= {
            _REQUEST: (self._request, partial(self._leave, "data_wait")),
            _TRAINING: (self._begin_training, self._end_training),
            _VALIDATION: (partial(self._enter, PAUSE), _nothing),
            _EPOCH: (self._begin_epoch, _nothing),
            _UPDATE: (self._begin_update, partial(self._leave, "optimizer")),
        }
        self._hook = ProfilerHook(trainer, actions)

    def stop_listening(self) -> None:
        """Tell no more."""
        hook, self._hook, self.is_measuring = self._hook, None, False
        if hook is not None:
            hook.detach()

    @never_raise
    def _begin_epoch(self) -> None:
        if self.is_measuring:
            self._listener.fit_time.begin_epoch()

    def _begin_batch(self) -> None:
        self._listener.fit_time.ask()
        self._listener.begin_batch()
        self._has_begun = True

    @never_raise
    def _request(self) -> None:
        if self.is_measuring:
            if not self._is_training:
                self._begin_batch()
            self._timer.enter("data_wait")

    @never_raise
    def _begin_training(self) -> None:
        if self.is_measuring:
            if not self._has_begun:
                self._begin_batch()
            self._is_training = True
            self._listener.begin_training()

    @never_raise
    def _end_training(self) -> None:
        self._is_training = False

    @never_raise
    def _enter(self, part: str) -> None:
        if self.is_measuring:
            if part == PAUSE:
                self._listener.stop_recording()
                self._timer.settle()
            self._timer.enter(part)

    @never_raise
    def _leave(self, part: str) -> None:
        if self.is_measuring:
            self._timer.leave(part)
            if part == "data_wait" and self._listener.fit_time.is_waiting:
                self._listener.fit_time.receive()

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_measuring and self._has_begun:  # else its step asks for it
            self._listener.count_batch(trainer, batch)
            self._is_counted = True

    @never_raise
    def _begin_update(self) -> None:
        if self.is_measuring and self._timer.part != "forward":  # a closure may go on with the forward pass
            self._timer.enter("optimizer")

    @override
    @never_raise
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.is_measuring and self._timer.part == "forward":  # optimisation by hand, whose closure is over
            self._timer.enter("optimizer")

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self.is_measuring:  # automatic and manual optimisation both call this hook
            self._timer.enter("backward")

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._timer.leave("backward")
            self._listener.end_backward()

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_measuring:
            if not self._is_counted and batch is not None:  # its step has asked for it
                self._listener.count_batch(trainer, batch)
            self._has_begun = self._is_counted = False
            self._listener.end_batch(trainer)
            self._listener.fit_time.end_batch()

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._enter(PAUSE)  # while gradients are accumulated no action has come before this
            self._end_step(trainer)
            self._listener.fit_time.begin_validation()

    @override
    @never_raise
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._listener.fit_time.end_validation()
            self._timer.leave(PAUSE)

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.is_measuring:
            self._end_step(trainer)

    def _end_step(self, trainer: Trainer) -> None:
        if self._timer.current is not None and self._timer.current.trained:
            self._timer.end_step()
            self._listener.flush(trainer)  # the curves reach up to a validation or a checkpoint

    @override
    @never_raise
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._has_begun = False
            self._listener.stop_recording()
            self._timer.end_step()  # the time between two epochs is in no step
            self._listener.flush(trainer)


def _nothing() -> None:
    """What ends a validation or an epoch is told by a hook."""
