"""Restoring a run at its resume point: loop counters, batches, gradients, what is frozen, random states and log files.

Lightning alone does not resume exactly. In the middle of an epoch it loses the random states and the position in the
data. From a checkpoint of an epoch's last batch it skips the validation that follows. Here every checkpoint is taken
between a batch and what follows it (callback.py), and training continues from exactly there.
"""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder

from .._lightning import callbacks_of, on_restore_error, resume_after_last_batch
from ..random_state import restore_random_state
from .callback import Checkpoints
from .log_files import cut_logs
from .resume_point import ResumePoint


def prepare_resume(trainer: Trainer, data: Any, point: ResumePoint) -> None:
    """Have `trainer.fit(…, ckpt_path=point.path)` continue at the resume point; the trainer is not yet used.

    The data can begin in the middle of an epoch: `resume_at(epoch, batches)`.
    A value in the checkpoint that cannot be restored is a UserError of the fit; the log files are cut after that.
    """

    def cut(trainer: Trainer, module: LightningModule) -> None:
        cut_logs(trainer, point.steps)
        kept = getattr(trainer.checkpoint_callback, "metrics", {})  # a schedule or callback may follow one of them
        trainer.callback_metrics.update({key: torch.tensor(kept[key], dtype=torch.float64) for key in kept})

    callbacks = callbacks_of(trainer)
    # The first hook after everything has been restored; nothing has been logged by then.
    callbacks.insert(0, LambdaCallback(on_train_start=cut))
    if point.path is not None:
        # A search for a rate drops the checkpoint that is to be restored, whose optimizer has the rate that was found.
        callbacks[:] = [one for one in callbacks if type(one).on_fit_start is not LearningRateFinder.on_fit_start]
        data.resume_at(point.epoch, point.batches)
        on_restore_error(trainer, point.cannot_be_restored)
        resume_after_last_batch(trainer, lambda: _restore_and_save(trainer, point))


def _restore_and_save(trainer: Trainer, point: ResumePoint) -> None:
    module: Any = trainer.lightning_module
    parameters, rank = dict(module.named_parameters()), trainer.global_rank
    try:
        frozen = {*point.loop_state["frozen"]}  # a callback may have frozen or unfrozen a part in an earlier epoch
        for name, parameter in parameters.items():
            parameter.requires_grad_(name not in frozen)
        for name, part in module.named_modules():
            if getattr(part, "track_running_stats", None) is (name in frozen):  # otherwise it is as it was, or has none
                part.track_running_stats = name not in frozen
        for name, gradient in point.loop_state["gradients"][rank].items():
            parameters[name].grad = gradient.to(parameters[name])
        restore_random_state(point.loop_state["random"][rank])
    except Exception as error:
        raise point.cannot_be_restored(error) from error
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, Checkpoints):  # a validation may follow, whose checkpoint has the states before it
            callback.save_if_due(trainer)
