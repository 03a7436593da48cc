"""Two real ranks of a stranger's module, which returns, logs and tests something else on each of them."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from batchscope.callbacks.curves import TrainCurves
from batchscope.callbacks.prediction_images import PredictionImages
from batchscope.callbacks.target import StopAtTarget
from tests.support.spawned import ROOT, end, spawn
from tests.support.third_party_modules import Memory, Stranger, loader


class Different(Stranger):
    """Rank 0 returns `a` always and `b` from the second step on, rank 1 `a` in the first step and `c`."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, number = super().training_step(batch, batch_idx), torch.tensor(self.global_rank + 1.0)
        if self.global_rank == 0:
            return {"loss": loss * 0, "a": number} | ({"b": number} if self.global_step else {})
        return {"c": number, "loss": loss * 0 + 1} | ({} if self.global_step else {"a": number})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", self.global_step / 100 + self.global_rank)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        target = torch.full((len(batch[0]),), self.global_rank)
        return {"output": torch.eye(2)[target], "target": target, "input": batch[0]}


@pytest.mark.slow
def test_ranks_that_differ_agree_on_what_is_averaged_counted_and_ended(tmp_path: Path) -> None:
    done = end(spawn(ROOT, "-m", "tests.callbacks.test_ranks", str(tmp_path)))
    assert done.code == 0, done.err
    found, other = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert found["curve"][:2] == [
        {"train/loss": 0.5, "train/a": 1.5},
        {"train/loss": 0.5, "train/a": 1.0, "train/b": 1.0},
    ]
    assert found["confusion"] == [[8, 0], [0, 8]]
    assert found["steps"] == other["steps"] < 400


if __name__ == "__main__":  # one of two processes; Lightning starts the other
    folder, memory, images, stop = Path(sys.argv[1]), Memory(), PredictionImages(), StopAtTarget("val/acc", 0.5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=400,
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=[memory, TensorBoardLogger(folder)],
        num_sanity_val_steps=0,
        callbacks=[TrainCurves(), images, stop],
    )
    module = Different()
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(16), verbose=False)
    facts = {"steps": trainer.global_step, "curve": [row for _, row in memory.rows if "train/loss" in row]}
    facts["confusion"] = images.confusion.tolist() if images.confusion is not None else None
    (folder / str(trainer.global_rank)).write_text(json.dumps(facts))
