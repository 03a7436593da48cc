"""LearningRateWatch in anybody's project: who sets the rate of an update."""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from batchscope.callbacks.learning_rate import LearningRateWatch
from tests.support.third_party_modules import Stranger, loader


class Scheduled(Stranger):
    """Half the rate from the third step on."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Meddler(Callback):
    """Sets the rate of the fourth step."""

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.7


def watched(
    tmp_path: Path,
    module: lightning.LightningModule,
    *callbacks: Callback,
    epochs: int = 1,
    resume: bool = False,
    watch: LearningRateWatch | None = None,
) -> LearningRateWatch:
    """What a watch saw in five steps an epoch; a checkpoint of its last step is left."""
    watch, checkpoint = watch or LearningRateWatch(), tmp_path / "last.ckpt"
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=epochs, logger=False, callbacks=[*callbacks, watch],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader(), ckpt_path=checkpoint if resume else None)
    trainer.save_checkpoint(checkpoint)
    return watch


def test_a_schedule_is_no_change(tmp_path: Path) -> None:
    watch = watched(tmp_path, Scheduled())
    assert (watch.changed, watch.last) == ({}, None)


def test_one_changed_step_under_a_schedule_is_counted_and_does_not_last(tmp_path: Path) -> None:
    class Once(Meddler):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]

    watch = watched(tmp_path, Scheduled(), Once())
    assert watch.changed == {"steps": 1, "first_step": 4, "from": 0.05, "to": 0.7}
    assert watch.last is None


def test_without_a_schedule_a_change_lasts(tmp_path: Path) -> None:
    watch = watched(tmp_path, Stranger(), Meddler())
    assert (watch.changed["steps"], watch.changed["first_step"], watch.last) == (2, 4, 0.7)


def test_a_resumed_run_counts_the_changes_of_the_whole_run(tmp_path: Path) -> None:
    watched(tmp_path, Stranger(), Meddler())
    watch = watched(tmp_path, Stranger(), epochs=2, resume=True)
    assert watch.changed == {"steps": 7, "first_step": 4, "from": 0.01, "to": 0.7}


def test_a_run_resumed_after_its_last_step_knows_what_was_changed(tmp_path: Path) -> None:
    watched(tmp_path, Stranger(), Meddler())
    watch = watched(tmp_path, Stranger(), resume=True)
    assert (watch.changed["steps"], watch.last) == (2, 0.7)


def test_a_watch_that_is_used_again_for_a_new_run_starts_from_zero(tmp_path: Path) -> None:
    watch = watched(tmp_path, Stranger(), Meddler())
    watched(tmp_path, Stranger(), watch=watch)
    assert (watch.changed, watch.last) == ({}, None)


def test_a_rate_that_lies_on_the_device_is_not_read(tmp_path: Path) -> None:
    class OnDevice(Stranger):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.1), foreach=False)

    assert watched(tmp_path, OnDevice()).changed == {}
