"""Task: the one LightningModule. It joins a model, the loss that its data asks for, metrics and an optimizer."""

import math
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from .._lightning import datamodule_of
from .._torch import is_batch_norm, supports_found_inf
from ..data.spec import PADDING, DataSpec
from ..distributed.sharding import shard
from ..errors import UserError
from .optimizer import Optimizer

Batch = Any  # what a DataSpec takes apart: `(x, y)`, `(x, y, lengths)` or a dict


class Task(LightningModule):
    """Trains any model of the zoo on any dataset of the zoo.

    The loss is cross-entropy for classes and mean squared error for values. A training step returns `loss` and, for
    classes, `acc` as tensors that stay on the device: callbacks read them when they are ready. Under DDP each rank
    scales loss and accuracy by its share of the global batch, so that the mean over ranks is the global mean.

    Where sequences vary in length, the padding behind their ends counts in no loss and no accuracy.

    Args:
        model: `(B, …)` → `(B, num_outputs)`, or `(B, T, num_outputs)` where the target is a class per step. Its forward
            takes `lengths: (B,)` where they vary.
        spec: of the data.
        optimizer: builds torch's optimizer and schedule.
        channels_last: store images and convolutions channels-last on CPU and CUDA, where that layout is faster.
        compile_mode: torch.compile's, for the network in training; None to run it as it is. Only whole batches run the
            compiled network, so that it is compiled once: the short last batch of an epoch, validation and test run it
            as it is. Checkpoints have the same names either way.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        optimizer: Optimizer,
        channels_last: bool = True,
        compile_mode: str | None = None,
    ):
        super().__init__()
        self.model = model
        self.spec = spec
        self.min_samples = min_samples(model, spec)  # of a rank; now: a sharded model cannot be tried
        self.optimizer_recipe = optimizer
        self.learning_rate: float | None = None  # scaled to the batch size; LearningRateFinder reads it by this name
        self.compile_mode = compile_mode
        self._compiled_samples: int | None = None  # of the batches that run the compiled network; None: of all
        self.channels_last = channels_last and any(isinstance(m, nn.Conv2d) for m in model.modules())
        self.classifies = spec.target != "value"
        self.pads = spec.variable_length and spec.target == "class_per_step"
        self._batch_weight: float = 1
        # Lightning's own mean over ranks rounds the number of samples: it is wrong where they do not divide evenly.
        self.val_loss, self.test_loss = MeanMetric(nan_strategy="disable"), MeanMetric(nan_strategy="disable")
        if self.classifies:
            self.val_acc, self.test_acc = _accuracy_metric(spec), _accuracy_metric(spec)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a sample as the network computes on it: that of the data, unless the model resizes it."""
        return getattr(self.model, "input_shape", self.spec.input_shape)

    @override
    def setup(self, stage: str) -> None:
        # MPS is no faster with channels-last, and a sharded model takes plain parameters.
        has_layout = self.trainer.strategy.root_device.type in ("cpu", "cuda") and not self._is_sharded
        self.channels_last = self.channels_last and has_layout
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)
        if self.compile_mode and stage == "fit":
            self._compiled_samples = getattr(datamodule_of(self.trainer), "batch_size", None)
            self.model.compile(mode=self.compile_mode, dynamic=False)

    @override
    def configure_model(self) -> None:
        if self._is_sharded:
            shard(self.model, self.trainer.strategy.root_device, self.trainer.world_size)

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.trainer.strategy, ModelParallelStrategy)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The model's output for inputs `x: (B, …)`, sequences of `lengths: (B,)` if these vary."""
        if self.channels_last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        padding = {} if lengths is None else {"lengths": lengths}
        if self.compile_mode and not (self.training and self._compiled_samples in (None, len(x))):
            with torch.compiler.set_stance("force_eager"):
                return self.model(x, **padding)
        return self.model(x, **padding)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean loss: `output: (B, N)` or `(B, T, N)`; `y: (B,)` or `(B, T)` classes, or `(B,)` values."""
        if not self.classifies:
            return F.mse_loss(output.squeeze(-1), y)
        return F.cross_entropy(output.flatten(0, -2), y.flatten(), ignore_index=PADDING)

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.trainer.world_size > 1:
            sampler = getattr(self.trainer.train_dataloader, "batch_sampler", None)
            self._batch_weight = sampler.weight(batch_idx) if sampler is not None and hasattr(sampler, "weight") else 1

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x, y, lengths = self.spec.parts(batch)
        output = self(x, lengths)
        result = {"loss": self.loss(output, y)}
        if self.classifies:
            result["acc"] = self._accuracy(output.detach(), y)
        return result if self._batch_weight == 1 else {k: v * self._batch_weight for k, v in result.items()}

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Adds to `val/loss` and `val/acc`; returns what `test_step` returns."""
        x, y, _ = self.spec.parts(batch)
        return {"output": self._evaluate(batch, "val"), "input": x, "target": y}

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Adds to `test/loss` and `test/acc`; returns `input`, `output` and `target` for images of predictions."""
        x, y, _ = self.spec.parts(batch)
        return {"output": self._evaluate(batch, "test"), "input": x, "target": y}

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The answers to inputs without targets, `(x,)` or `(x, lengths)`: `input` and `output`."""
        x, *lengths = batch
        return {"input": x, "output": self(x, *lengths)}

    @override
    def configure_optimizers(self) -> Any:
        """Torch's optimizer and, unless the rate is constant, its schedule."""
        recipe = self.optimizer_recipe.scaled_to(self._samples_per_update())
        steps = self.trainer.estimated_stepping_batches
        has_end = 0 <= steps < math.inf or self.trainer.max_epochs == -1  # which the recipe refuses in its own words
        if recipe.interval == "step" and not has_end:  # a loader without a length
            raise UserError(
                f"optimizer.schedule: {recipe.schedule} ends with the run, and the data's loader does not say how many "
                "batches it has: give trainer.max_steps, or optimizer.schedule=constant"
            )
        self.learning_rate = recipe.lr
        optimizer = recipe.build(self.parameters())
        schedule = recipe.build_schedule(optimizer, steps)
        if schedule is None:
            return optimizer
        stepped = {"scheduler": schedule, "interval": recipe.interval}
        if isinstance(schedule, ReduceLROnPlateau):  # an epoch without a validation has nothing new to say
            every = self.trainer.check_val_every_n_epoch
            stepped |= {"monitor": "val/loss", "frequency": every or 1, "strict": every is not None}
        return {"optimizer": optimizer, "lr_scheduler": stepped}

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by `trainer.gradient_clip_val`, also under mixed precision.

        Lightning refuses that for fused optimizers: their `step` unscales the gradients, and scaled gradients must not
        be clipped. Here the scaler unscales them before. It remembers that until `step`, which then divides by no scale
        and still skips the update where a gradient overflowed, without the host reading the device.
        """
        plugin = self.trainer.precision_plugin
        if not gradient_clip_val or not supports_found_inf(optimizer) or not isinstance(plugin, MixedPrecision):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if plugin.scaler is not None:  # there is none at bf16-mixed
            plugin.scaler.unscale_(optimizer)
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)  # MixedPrecision's own refuses

    def _samples_per_update(self) -> int:
        """Of all devices and accumulated batches; the optimizer's reference where the data does not say."""
        batch_size = getattr(datamodule_of(self.trainer), "batch_size", None)
        if batch_size is None:
            return self.optimizer_recipe.reference_batch_size
        return batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def _evaluate(self, batch: Batch, stage: str) -> Tensor:
        x, y, lengths = self.spec.parts(batch)
        # With fewer samples than ranks, a rank without any takes part in collective operations, and counts nothing.
        one = None if lengths is None else lengths.new_ones(1)
        output = self(x, lengths) if len(x) else self(x.new_zeros(1, *x.shape[1:]), one)[:0]
        answers, asked = output.flatten(0, -2), y.flatten()
        if self.pads:
            is_step = asked != PADDING
            answers, asked = answers[is_step], asked[is_step]
        measured: dict[str, Metric] = {"loss": self.val_loss if stage == "val" else self.test_loss}
        # One value a sample, or a step of different lengths: where torchmetrics may not look for NaN, it ignores weights.
        measured["loss"].update(self.loss(output, y).expand(len(asked) if self.pads else len(x)))
        if self.classifies:
            measured["acc"] = self.val_acc if stage == "val" else self.test_acc
            if len(x):
                measured["acc"].update(answers, asked)
        for name, metric in measured.items():
            in_bar = name == "acc" and stage == "val"
            self.log(f"{stage}/{name}", metric, batch_size=len(x), on_step=False, on_epoch=True, prog_bar=in_bar)
        return output

    def _accuracy(self, output: Tensor, y: Tensor) -> Tensor:
        """The fraction of correct answers `()`, over the steps that ask for one."""
        correct = output.argmax(dim=-1) == y
        if self.spec.blank_class is None and not self.pads:
            return correct.float().mean()
        asked = y != (PADDING if self.spec.blank_class is None else self.spec.blank_class)
        if self.pads:
            asked &= y != PADDING
        return (correct & asked).sum() / asked.sum()


def _accuracy_metric(spec: DataSpec) -> MulticlassAccuracy:
    """The fraction of all answers that are correct, whatever their class."""
    return MulticlassAccuracy(spec.num_outputs, average="micro", ignore_index=spec.blank_class, validate_args=False)


def min_samples(model: nn.Module, spec: DataSpec) -> int:
    """The fewest samples that a model can be trained on: 2 where batch norm would see one value a channel, else 1."""
    if not any(is_batch_norm(module) for module in model.modules()):
        return 1
    return 2 if not _runs(model, spec, samples=1) and _runs(model, spec, samples=2) else 1


def _runs(model: nn.Module, spec: DataSpec, samples: int) -> bool:
    """Whether a model takes this many samples, tried with weights that have shapes but no memory."""
    weights = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        with torch.no_grad():
            functional_call(model, weights, torch.empty(samples, *spec.input_shape, device="meta"))
    except Exception:  # noqa: BLE001 - anybody's model; training shows what is wrong with one that cannot be tried
        return False
    return True
