"""Task: the one LightningModule. It joins a model, the loss that its data asks for, metrics and an optimizer."""

import copy
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from ..data.spec import DataSpec
from ..distributed.sharding import shard
from .optimizer import Optimizer

Batch = tuple[Tensor, Tensor]


class Task(lightning.LightningModule):
    """Trains any model of the zoo on any dataset of the zoo.

    The loss is cross-entropy for classes and mean squared error for values. A training step returns `loss` and, for
    classes, `acc` as tensors that stay on the device: callbacks read them when they are ready. Of several processes,
    each returns what makes their mean that of the whole batch, also where it does not divide evenly.

    Args:
        model: `(B, …)` → `(B, num_outputs)`, or `(B, T, num_outputs)` where the target is a class per step.
        spec: of the data.
        optimizer: builds torch's optimizer and schedule.
        channels_last: store images and convolutions channels-last on CPU and CUDA, where that is the faster layout.
        provenance: kept in every checkpoint under `batchscope`; plain containers only.

    Attributes:
        min_samples: that a training step of one process takes at least.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        optimizer: Optimizer,
        channels_last: bool = True,
        provenance: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.model = model
        self.spec = spec
        self.min_samples = min_samples(model, spec)  # now: a sharded model cannot be copied to be tried
        self.optimizer_recipe = optimizer
        self.learning_rate: float | None = None  # as scaled to the batch, once the trainer is known
        self.provenance = provenance
        self._weight: float = 1
        self.channels_last = channels_last and any(isinstance(m, nn.Conv2d) for m in model.modules())
        self.classifies = spec.target != "value"
        # Lightning's own mean over processes rounds the number of samples: it is wrong where they do not divide.
        self.val_loss, self.test_loss = MeanMetric(nan_strategy="disable"), MeanMetric(nan_strategy="disable")
        if self.classifies:
            # Micro: the share of all answers that are right, whatever their class.
            options = {
                "num_classes": spec.num_outputs,
                "average": "micro",
                "ignore_index": spec.blank_class,
                "validate_args": False,
            }
            self.val_acc = MulticlassAccuracy(**options)
            self.test_acc = MulticlassAccuracy(**options)

    @property
    def title(self) -> str:
        """What is trained on what, as people call it: `cnn · mnist`."""
        known = self.provenance or {}
        model = known.get("choices", {}).get("model", type(self.model).__name__)
        return f"{model} · {known['dataset']}" if "dataset" in known else model

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a sample as the network computes on it: that of the data, unless the model says that it resizes it."""
        return getattr(self.model, "input_shape", self.spec.input_shape)

    def setup(self, stage: str) -> None:
        """Choose the memory layout once the device is known; on MPS channels-last is not the faster one."""
        device, is_sharded = self.trainer.strategy.root_device.type, self._is_sharded
        self.channels_last = (
            self.channels_last and device in ("cpu", "cuda") and not is_sharded
        )  # which takes plain ones
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)

    def configure_model(self) -> None:
        """Under `trainer=fsdp`, divide the model among the processes."""
        if self._is_sharded:
            shard(self.model, self.trainer.strategy.root_device, self.trainer.world_size)

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.trainer.strategy, ModelParallelStrategy)

    def forward(self, x: Tensor) -> Tensor:
        """The model's output for inputs `x: (B, …)`."""
        if self.channels_last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        return self.model(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean loss: `output: (B, N)` or `(B, T, N)`; `y: (B,)` or `(B, T)` classes, or `(B,)` values."""
        if not self.classifies:
            return F.mse_loss(output.squeeze(-1), y)
        return F.cross_entropy(output.flatten(0, -2), y.flatten())

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Know what this process's part of the batch counts for among those of all processes."""
        if self.trainer.world_size > 1:
            sampler = getattr(self.trainer.train_dataloader, "batch_sampler", None)
            self._weight = sampler.weight(batch_idx) if hasattr(sampler, "weight") else 1

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """`loss`, and `acc` for classes; nothing is read from the device."""
        x, y = batch
        output = self(x)
        result = {"loss": self.loss(output, y)}
        if self.classifies:
            result["acc"] = self._accuracy(output.detach(), y)
        return result if self._weight == 1 else {key: value * self._weight for key, value in result.items()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds to `val/loss` and `val/acc`."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Adds to `test/loss` and `test/acc`; returns `output` and `target` for the pictures."""
        return {"output": self._evaluate(batch, "test"), "target": batch[1]}

    def configure_optimizers(self) -> dict[str, Any]:
        """Torch's optimizer and, unless the rate is constant, its schedule by step."""
        recipe = self.optimizer_recipe.scaled_to(self._samples_per_update())
        self.learning_rate = recipe.lr
        optimizer = recipe.build(self.parameters())
        schedule = recipe.build_schedule(optimizer, self.trainer.estimated_stepping_batches)
        if schedule is None:
            return {"optimizer": optimizer}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by `trainer.gradient_clip_val`, under mixed precision too.

        Lightning refuses that for fused optimizers, because a gradient scaler leaves the unscaling to their `step`, and
        scaled gradients must not be clipped. The scaler unscales here instead. It remembers that until `step`: the
        optimizer then gets no scale to divide by, and still leaves the update out where a gradient overflowed, without
        the host reading the device.
        """
        plugin = self.trainer.precision_plugin
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not gradient_clip_val or not fused or not isinstance(plugin, MixedPrecision):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if plugin.scaler is not None:  # there is none at bf16-mixed
            plugin.scaler.unscale_(optimizer)
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)  # MixedPrecision's own refuses

    def _samples_per_update(self) -> int:
        """Of all devices and accumulated batches; the optimizer's reference where the data does not say."""
        batch_size = getattr(self.trainer.datamodule, "batch_size", None)
        if batch_size is None:
            return self.optimizer_recipe.reference_batch_size
        return batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say in the checkpoint what it is of, so that it can be evaluated by its path alone."""
        if self.provenance is not None:
            checkpoint["batchscope"] = self.provenance

    def _evaluate(self, batch: Batch, stage: str) -> Tensor:
        x, y = batch
        # With fewer samples than processes, one that has none takes part in what they do together, and counts nothing.
        output = self(x) if len(x) else self(x.new_zeros(1, *x.shape[1:]))[:0]
        loss = self.loss(output, y)
        measured = {"loss": self.val_loss if stage == "val" else self.test_loss}
        measured["loss"].update(loss.expand(len(x)))  # torchmetrics ignores weights where it may not look for NaN
        if self.classifies:
            measured["acc"] = self.val_acc if stage == "val" else self.test_acc
            if len(x):
                measured["acc"].update(output.flatten(0, -2), y.flatten())
        for name, metric in measured.items():
            shown = name == "acc" and stage == "val"
            self.log(f"{stage}/{name}", metric, batch_size=len(x), on_step=False, on_epoch=True, prog_bar=shown)
        return output

    def _accuracy(self, output: Tensor, y: Tensor) -> Tensor:
        """The share of right answers `()`, over the steps that ask for one."""
        right = output.argmax(dim=-1) == y
        if self.spec.blank_class is None:
            return right.float().mean()
        asked = y != self.spec.blank_class
        return (right & asked).sum() / asked.sum()


def min_samples(model: nn.Module, spec: DataSpec) -> int:
    """The samples that a model takes at least in training.

    Returns:
        2 where batch norm would see one value a channel of a single sample, otherwise 1.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return 1
    return 2 if not _runs(model, spec, samples=1) and _runs(model, spec, samples=2) else 1


def _runs(model: nn.Module, spec: DataSpec, samples: int) -> bool:
    """Whether a model takes so many samples, tried with a copy that has shapes but no memory."""
    try:
        with torch.no_grad():
            copy.deepcopy(model).train().to("meta")(torch.empty(samples, *spec.input_shape, device="meta"))
    except Exception:  # noqa: BLE001 - anybody's model; one that cannot be tried is left to show itself in training
        return False
    return True
