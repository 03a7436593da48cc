"""LoopEvents: translates Lightning's hooks and profiler actions of a batch into a timer's parts and calls of a FitListener.

No other file knows these hooks and actions. One batch, in the order of Lightning's events:

    train_dataloader_next → on_train_batch_start → run_training_batch (optimizer_step (training_step, backward)) → …_end

Under manual optimisation training_step contains the backward passes and the optimizer_steps, each with or without a closure.
Time counts for the innermost part. The batches of an epoch are within run_training_epoch, which begins with the loader's `iter`.
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
# Training on a batch: the action begins after on_train_batch_start, in which other callbacks may enter their modes.
_TRAINING = "run_training_batch"
_EPOCH = "run_training_epoch"
_UPDATE = "optimizer_step"
# The first profiled action of a validation between two updates; the validation ends with on_validation_end.
_VALIDATION = "on_validation_model_zero_grad"
# Lightning's profiler actions, by the last part of their names → the part of the step to which their time counts.
_PARTS = {
    "on_before_batch_transfer": "data_wait",  # a user's hooks around the copy prepare the batch, like a loader
    "on_after_batch_transfer": "data_wait",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": PAUSE,
}


class FitListener:
    """Receives the events of each batch of a fit; LoopEvents marks the parts of the batch on the listener's timer.

    The events are `begin_batch`, `count_batch`, `begin_training`, `end_backward`, `end_batch`. With a `dataloader_iter` as its
    argument the `training_step` begins the batch, which is counted before `end_batch`. A batch that is None is not counted.

    Attributes:
        timer: times the steps of the fit.
        fit_time: divides the wall time of the fit.
    """

    def __init__(self, timer: StepTimer, fit_time: "FitTimer"):
        self.timer, self.fit_time = timer, fit_time

    def begin_batch(self) -> None:
        """The loader is asked for a batch. Begin the batch on the timer, at the end of the last one."""
        self.timer.begin_batch()

    def count_batch(self, trainer: Trainer, batch: Any) -> None:
        """The batch has come."""

    def begin_training(self) -> None:
        """The training on the batch begins."""

    def end_backward(self) -> None:
        """The backward pass of the batch is over."""

    def end_batch(self, trainer: Trainer) -> None:
        """The batch was trained, and Lightning has counted its update, if it ended one. End its training on the timer.

        The batch's time goes on until the next batch, a validation or a checkpoint begins, or the epoch ends.
        """
        self.timer.end_batch(trainer.global_step)

    def stop_recording(self) -> None:
        """A validation or a checkpoint follows, or the end of an epoch."""

    def flush(self, trainer: Trainer) -> None:
        """The step has ended, and the next one does not follow at once."""


class LoopEvents(Callback):
    """Calls a FitListener for each batch, from `listen` until `stop_listening`. An exception in the listener disables it.

    Attributes:
        is_measuring: whether the steps of a fit are being measured.
        began: the start of the fit, by `time.perf_counter()`; None if this callback was added later.
    """

    is_measuring = False
    _listener: FitListener
    _timer: StepTimer
    began: float | None = None
    _profiler_hook: ProfilerHook | None = None
    _is_training = False
    _has_batch = False  # whether a batch has begun and not ended
    _is_batch_counted = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = time.perf_counter()

    def listen(self, trainer: Trainer, listener: FitListener) -> None:
        """Begin to call a listener for the batches of a fit."""
        self._listener, self._timer = listener, listener.timer
        add_timer(trainer, listener.timer)
        self.is_measuring, self._is_training, self._has_batch, self._is_batch_counted = True, False, False, False
        actions = {name: (partial(self._enter, part), partial(self._leave, part)) for name, part in _PARTS.items()}
        actions |= {
            _REQUEST: (self._request_batch, partial(self._leave, "data_wait")),
            _TRAINING: (self._begin_training, self._end_training),
            _VALIDATION: (partial(self._enter, PAUSE), _ignore_end),
            _EPOCH: (self._begin_epoch, _ignore_end),
            _UPDATE: (self._begin_update, partial(self._leave, "optimizer")),
        }
        self._profiler_hook = ProfilerHook(trainer, actions)

    def stop_listening(self) -> None:
        """Stop calling the listener."""
        hook, self._profiler_hook, self.is_measuring = self._profiler_hook, None, False
        if hook is not None:
            hook.detach()

    @never_raise
    def _begin_epoch(self) -> None:
        if self.is_measuring:
            self._listener.fit_time.begin_epoch()

    def _begin_batch(self) -> None:
        self._listener.fit_time.request_batch()
        self._listener.begin_batch()
        self._has_batch = True

    @never_raise
    def _request_batch(self) -> None:
        if self.is_measuring:
            if not self._is_training:
                self._begin_batch()
            self._timer.enter("data_wait")

    @never_raise
    def _begin_training(self) -> None:
        if self.is_measuring:
            if not self._has_batch:
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
            is_batch = part == "data_wait" and self._timer.part != PAUSE  # else it may be one of a validation
            if is_batch and self._listener.fit_time.is_waiting:
                self._listener.fit_time.receive_first_batch()

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_measuring and self._has_batch:  # else `training_step` takes the batch from `dataloader_iter`
            self._listener.count_batch(trainer, batch)
            self._is_batch_counted = True

    @never_raise
    def _begin_update(self) -> None:
        if self.is_measuring and self._timer.part != "forward":  # a closure may continue the forward pass
            self._timer.enter("optimizer")

    @override
    @never_raise
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.is_measuring and self._timer.part == "forward":  # manual optimisation, after its closure
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
            if not self._is_batch_counted and batch is not None:  # `training_step` has taken it from `dataloader_iter`
                self._listener.count_batch(trainer, batch)
            self._has_batch = self._is_batch_counted = False
            self._listener.end_batch(trainer)
            self._listener.fit_time.end_batch()

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._enter(PAUSE)  # while gradients are accumulated no profiler action precedes this hook
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
        if self._timer.current is not None and self._timer.current.is_trained:
            self._timer.end_step()
            self._listener.flush(trainer)  # the curves reach up to a validation or a checkpoint

    @override
    @never_raise
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._has_batch = False
            self._listener.stop_recording()
            self._timer.end_step()  # exclude the time between two epochs from the steps
            self._listener.flush(trainer)


def _ignore_end() -> None:
    """Ignore the end of an action: a hook announces the end of a validation or an epoch."""
