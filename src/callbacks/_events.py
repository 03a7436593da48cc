"""LoopEvents: what Lightning's training loop does with a batch, as a few events; of a batch the monitor knows no other hooks.

One batch, as the loop announces it:

    train_dataloader_next → on_train_batch_start → run_training_batch (optimizer_step (training_step, backward)) → …_end

The innermost part has the time. Those of an epoch are within run_training_epoch, which begins with the loader's `iter`.
"""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from ._never_raise import never_raise
from ._profiler_hook import ProfilerHook
from ._timer import PAUSE

_REQUEST = "train_dataloader_next"
# Training on a batch: it begins after on_train_batch_start, where modes of other callbacks may begin.
_TRAINING = "run_training_batch"
_EPOCH = "run_training_epoch"
# The first profiled action of a validation between two updates; the validation ends with on_validation_end.
_VALIDATION = "on_validation_model_zero_grad"
# Lightning's profiler actions, by the last part of their names → the part of the step that the action is.
_PARTS = {
    _REQUEST: "data_wait",
    "on_before_batch_transfer": "data_wait",  # a user's hooks around the copy prepare the batch, as a loader does
    "on_after_batch_transfer": "data_wait",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": PAUSE,
    _VALIDATION: PAUSE,
}


class LoopEvents(Callback):
    """Calls a subclass's methods below, from `listen` on, while it measures.

    An exception in one of them disables it; one in `count_batch` ends the run.

    A batch is `begin_batch`, `count_batch`, `begin_training`, `end_batch`, with `enter` and `leave` for its parts. A
    step that asks for its batch itself begins with its training, and is counted before its end; one that asks for several, or
    a batch that is None, is not counted.

    Attributes:
        is_measuring: whether the steps of a fit are being measured.
    """

    is_measuring = False
    _hook: ProfilerHook | None = None
    _is_training = False
    _has_begun = False  # whether a batch has begun that has not ended
    _is_counted = False  # whether it has come
    _asked = 0  # how many batches its step has asked for

    def begin_epoch(self) -> None:
        """The loader is asked for the batches of an epoch; before the first epoch Lightning has asked it."""

    def begin_batch(self) -> None:
        """A batch is asked for."""

    def count_batch(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """It has come."""

    def begin_training(self) -> None:
        """Its step begins."""

    def end_batch(self, trainer: Trainer) -> None:
        """It was trained, and Lightning has counted its update, if it ended one."""

    def enter(self, part: str) -> None:
        """A part of the step begins, or a pause."""

    def leave(self, part: str) -> None:
        """A part ends, which may not have begun."""

    def settle(self) -> None:
        """A validation or a checkpoint follows, and nothing of it has happened yet."""

    def end_step(self, trainer: Trainer) -> None:
        """The step ends; the validation or the checkpoint is not in it."""

    def begin_validation(self) -> None:
        """The validation begins."""

    def end_validation(self) -> None:
        """It is over."""

    def end_epoch(self, trainer: Trainer) -> None:
        """An epoch is over."""

    def listen(self, trainer: Trainer) -> None:
        """Begin to tell of a fit."""
        self.is_measuring, self._is_training, self._has_begun = True, False, False
        self._hook = ProfilerHook.attach(
            trainer, {*_PARTS, _TRAINING, _EPOCH}, self._on_action_start, self._on_action_end
        )

    def end_listening(self, trainer: Trainer) -> None:
        """Give the trainer its profiler back."""
        if self._hook is not None:
            self._hook.detach(trainer)
            self._hook = None

    def _begin_batch(self) -> None:
        self.begin_batch()
        self._has_begun, self._is_counted, self._asked = True, False, 0

    @never_raise
    def _on_action_start(self, action: str) -> None:
        if not self.is_measuring:
            return
        if action == _EPOCH:
            self.begin_epoch()
            return
        if action == _TRAINING:
            if not self._has_begun:
                self._begin_batch()
            self._is_training = True
            self.begin_training()
            return
        if action == _REQUEST:
            if self._is_training:
                self._asked += 1
            else:
                self._begin_batch()
        if _PARTS[action] == PAUSE:
            self.settle()
        self.enter(_PARTS[action])

    @never_raise
    def _on_action_end(self, action: str) -> None:
        if action == _TRAINING:
            self._is_training = False
        elif self.is_measuring and action not in (_VALIDATION, _EPOCH):
            self.leave(_PARTS[action])

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_measuring and self._has_begun:
            self._is_counted = True
            self.count_batch(trainer, pl_module, batch)

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self.is_measuring:  # automatic and manual optimisation both call this hook
            self.enter("backward")

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self.leave("backward")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_measuring and not self._is_counted and self._asked == 1:  # of several nobody has the others
            self.count_batch(trainer, pl_module, batch)
        self._end_batch(trainer)

    @never_raise
    def _end_batch(self, trainer: Trainer) -> None:
        if self.is_measuring:
            self._has_begun = False
            self.end_batch(trainer)

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self.settle()
            self.enter(PAUSE)  # while gradients are accumulated no action has come before this
            self.end_step(trainer)
            self.begin_validation()

    @override
    @never_raise
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self.end_validation()
            self.leave(PAUSE)

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.is_measuring:
            self.end_step(trainer)

    @override
    @never_raise
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measuring:
            self._has_begun = False
            self.end_epoch(trainer)
