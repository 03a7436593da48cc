"""A callback: any Lightning callback. conf/experiment/mynet.yaml adds it to a run."""

import torch
from lightning import Callback, LightningModule, Trainer


class WeightNorm(Callback):
    """Logs the length of all weights after each epoch as `train/weight_norm`: to TensorBoard, the CSV file and run.json."""

    observes_only = True  # training is the same without it

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning calls this after each epoch; a step would be too often."""
        norms = torch.stack([weight.detach().norm() for weight in pl_module.parameters()])
        pl_module.log("train/weight_norm", norms.norm())
