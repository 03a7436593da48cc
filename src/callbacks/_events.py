"""LoopEvents: what Lightning's training loop does with a batch becomes marks of its parts, and a few events.

No other file knows Lightning's hooks and actions of a batch. One batch, as the loop announces it:

    train_dataloader_next → on_train_batch_start → run_training_batch (optimizer_step (training_step, backward)) → …_end

Where a module optimises by hand, its training_step has the backward passes and the optimizer_steps, each with a closure or without.
The innermost part has the time. Those of an epoch are within run_training_epoch, which begins with the loader's `iter`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ._fit_time import FitTimer
from ._never_raise import never_raise
from ._profiler_hook import ProfilerHook
from ._timer import PAUSE, HostClock, StepTimer, add_timer

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


class LoopEvents(Callback):
    """Marks the parts of each batch, from `listen` on, while it measures, and calls a subclass's methods below.

    An exception in one of them disables it; one in `count_batch` ends the run.

    A batch is `begin_batch`, `count_batch`, `begin_training`, `end_backward`, `end_batch`. A step that asks for its batch
    itself begins with its training, and its batch is counted before `end_batch`; one that is None is not counted.

    Attributes:
        is_measuring: whether the steps of a fit are being measured.
    """

    is_measuring = False
    _fit: FitTimer
    _begun: FitTimer | None = None  # when the fit began
    _is_training = False
    _has_begun = False  # whether a batch has begun that has not ended

    def __init__(self) -> None:
        self._timer = StepTimer(HostClock())

    def begin_batch(self) -> None:
        """A batch is asked for; begins it on the timer, where the one before ends."""
        self._timer.begin_batch()

    def count_batch(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """It has come."""

    def begin_training(self) -> None:
        """Its step begins."""

    def end_backward(self) -> None:
        """Its backward pass is over."""

    def end_batch(self, trainer: Trainer) -> None:
        """It was trained, and Lightning has counted its update, if it ended one; says so to the timer.

        Its time goes on until the next batch begins, a validation or a checkpoint comes, or the epoch ends.
        """
        self._timer.end_batch(trainer.global_step)

    def stop_recording(self) -> None:
        """A validation or a checkpoint follows, or the end of an epoch."""

    def flush(self, trainer: Trainer) -> None:
        """The step has ended for a while."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = FitTimer()

    def listen(self, trainer: Trainer, timer: StepTimer) -> Callable[[], None]:
        """Begin to mark the parts of a fit; returns a function that ends this."""
        self._timer = timer
        self._fit = self._begun or FitTimer()  # a callback may be added after `on_fit_start`
        self._begun = None
        add_timer(trainer, timer)
        self.is_measuring, self._is_training, self._has_begun, self._is_counted = True, False, False, False
        actions = {name: (partial(self._enter, part), partial(self._leave, part)) for name, part in _PARTS.items()}
        actions |= {
            _REQUEST: (self._request, partial(self._leave, "data_wait")),
            _TRAINING: (self._begin_training, self._end_training),
            _VALIDATION: (partial(self._enter, PAUSE), _nothing),
            _EPOCH: (self._begin_epoch, _nothing),
            _UPDATE: (self._begin_update, partial(self._leave, "optimizer")),
        }
        return ProfilerHook(trainer, actions).detach

    @never_raise
    def _begin_epoch(self) -> None:
        if self.is_measuring:
            self._fit.begin_epoch()

    def _begin_batch(self) -> None:
        self._fit.ask()
        self.begin_batch()
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
            self.begin_training()

    @never_raise
    def _end_training(self) -> None:
        self._is_training = False

    @never_raise
    def _enter(self, part: str) -> None:
        if self.is_measuring:
            if part == PAUSE:
                self.stop_recording()
                self._timer.settle()
            self._timer.enter(part)

    @never_raise
    def _leave(self, part: str) -> None:
        if self.is_measuring:
            self._timer.leave(part)
            if part == "data_wait" and self._fit.is_waiting:
                self._fit.receive()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_measuring and self._has_begun:  # else its step asks for it
            self.count_batch(trainer, pl_module, batch)
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
            self.end_backward()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_measuring and not self._is_counted and batch is not None:  # its step has asked for it
            self.count_batch(trainer, pl_module, batch)
        self._end_batch(trainer)

    @never_raise
    def _end_batch(self, trainer: Trainer) -> None:
        if self.is_measuring:
            self._has_begun = self._is_counted = False
            self.end_batch(trainer)
            self._fit.end_batch()

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._enter(PAUSE)  # while gradients are accumulated no action has come before this
            self._end_step(trainer)
            self._fit.begin_validation()

    @override
    @never_raise
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._fit.end_validation()
            self._timer.leave(PAUSE)

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.is_measuring:
            self._end_step(trainer)

    def _end_step(self, trainer: Trainer) -> None:
        if self._timer.current is not None and self._timer.current.trained:
            self._timer.end_step()
            self.flush(trainer)  # the curves reach up to a validation or a checkpoint

    @override
    @never_raise
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._has_begun = False
            self.stop_recording()
            self._timer.end_step()  # the time between two epochs is in no step
            self.flush(trainer)


def _nothing() -> None:
    """What ends a validation or an epoch is told by a hook."""
