"""Task: the LightningModule that joins a model, a loss, metrics and an optimizer."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric
from typing_extensions import override

from .._torch import BATCH_NORM, lay_out_channels_last
from ..callbacks._batches import count_samples
from ..data.collate import missing_field
from ..data.spec import CLASSES, LENGTHS, PADDING, DataSpec, accepts_argument, computed_shape, forward_arguments
from ..errors import UnfitError, UserError, did_you_mean
from ..options.types import Node, Text
from .objective import accuracy, correct, for_loss, for_metrics, loss_function, selected_metrics
from .optimizer import Optimizer
from .trial import first_output

Batch = Any  # what `DataSpec.parts` splits: `(x, y)`, `(x, y, lengths)` or a dict


class Task(LightningModule):
    """Trains any network on any data with a DataSpec.

    A training step returns `loss` and, for classes, `acc` as tensors that stay on the device: callbacks read the tensors
    when they are ready. Under DDP each rank scales both by its share of the global batch, or by its share of the steps and
    pixels that count, so that the mean over ranks is the global mean.

    If sequences vary in length, the padding after their ends counts in no loss and no accuracy.

    A subclass (`task._target_`) may override `loss` and Lightning's hooks, and has options of its own beside
    `**kwargs`.

    Args:
        model: its forward takes the input `(B, …)`, and `lengths: (B,)` if lengths vary; it returns what the target of
            the spec asks for, or what the loss takes.
        spec: the DataSpec of the data.
        optimizer: builds torch's optimizer and schedule.
        channels_last: store images and convolutions channels-last on CPU and CUDA, where that layout is faster.
        compile_mode: the mode of torch.compile for the network in training; None does not compile. Only full batches run
            the compiled network, so that it is compiled once: the short last batch of an epoch, validation and test run
            the network eagerly. Checkpoints have the same names either way.
        loss: the name of a loss, `auto` for the default loss of the data's target, or a function or module of
            `(output, target)` that returns the mean over a batch. It gets classes of steps as `(B·T, N)` and `(B·T,)`, a
            value as `(B,)` and `(B,)`, the logit of two classes without its dimension N and with the classes as floats,
            anything else as the network and the data return it; −100 is no class.
        metrics: metrics by name; each is logged as `val/NAME` and `test/NAME` over a whole set.
            It is updated with what the loss gets, but with probabilities and integers for labels.
        freeze: name patterns, as in fnmatch, of parameters of the network that are not trained. Batch norm whose
            parameters are all frozen keeps its running statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        optimizer: Optimizer,
        channels_last: bool = True,
        compile_mode: str | None = None,
        loss: Literal["auto", "cross_entropy", "bce", "mse", "l1", "smooth_l1"] | Node = "auto",
        metrics: dict | None = None,
        freeze: Annotated[list[str], Text.CHOICE] | tuple[str, ...] = (),
    ):
        super().__init__()
        self.model = model
        self.spec = spec
        self.optimizer_recipe = optimizer
        # Over all ranks and accumulated batches; None if unknown, and then the learning rate is not scaled.
        self.samples_per_update: int | None = None
        self.lr_scaling: dict[str, Any] | None = None  # for the record: see records/learning_rate.py
        self.compile_mode = compile_mode
        self._compiled_samples: int | None = None  # the size of batches that run the compiled network; None for any
        self.channels_last = channels_last and any(isinstance(m, nn.Conv2d) for m in model.modules())
        if type(self).loss is Task.loss or loss != "auto" or spec.target != "any":
            self.loss_name, self.loss_function = loss_function(loss, spec)
        if type(self).loss is not Task.loss:
            self.loss_name = f"{type(self).__name__}.loss"
        # A loss by name is a mean over the targets that count; any other loss is a mean over samples.
        self.has_named_loss = isinstance(loss, str) and type(self).loss is Task.loss
        self.has_accuracy = spec.target in CLASSES and "acc" not in (metrics or {})
        self.is_tried = False  # whether a batch has shown that network, loss and metrics fit the data
        self.input_dtype = ""  # of the first input, such as `uint8`; empty until a batch was tried
        self.test_correct: list[Tensor] = []  # (B,) bool for each batch of the test, if a sample has one class
        self.is_of_zoo = type(model).__module__.startswith("batchscope.models.")  # models whose activations are small
        self._takes_lengths = accepts_argument(model, LENGTHS)
        self.measured = self._build_metrics(selected_metrics(metrics))
        self._metric_modules = _Metrics(m for stage in self.measured.values() for m in stage.values())
        self._frozen_norms = self._freeze(freeze)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # Lightning sets it 44 times a step, which takes nn.Module 1.3 µs each
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a sample in the network: that of the data, unless the model declares that it resizes samples."""
        return computed_shape(self.model, self.spec)

    @property
    def sample_means(self) -> list[str]:
        """The names of the metrics that are means over samples, steps or pixels, and not over classes."""
        return [name for name, m in self.measured["test"].items() if getattr(m, "average", "micro") == "micro"]

    def prepare(self, trainer: Trainer, batch_size: int | None, samples_per_update: int | None) -> None:
        """Prepare for a fit. This is no hook of Lightning, because a subclass may override a hook without `super()`.

        Args:
            trainer: the trainer of the fit.
            batch_size: the samples of a full batch, which runs the compiled network; None if every batch does.
            samples_per_update: over all ranks and accumulated batches; None to leave the learning rate unscaled.
        """
        self._compiled_samples, self.samples_per_update = batch_size, samples_per_update
        self._lay_out(trainer)
        if self.compile_mode:
            self.model.compile(mode=self.compile_mode, dynamic=None if self.spec.variable_length else False)

    @override
    def setup(self, stage: str) -> None:
        self._lay_out(self.trainer)

    def _lay_out(self, trainer: Trainer) -> None:
        # MPS is no faster with channels-last.
        self.channels_last = self.channels_last and trainer.strategy.root_device.type in ("cpu", "cuda")
        if self.channels_last:
            lay_out_channels_last(self.model)

    def forward(self, x: Tensor | Mapping[str, Tensor], lengths: Tensor | None = None) -> Tensor:
        """Return the model's output for an input `x: (B, …)` or several inputs by name, with `lengths: (B,)` if they vary."""
        if self.channels_last:
            x = _channels_last(x)
        args, named = forward_arguments(x, lengths if self._takes_lengths else None)
        if self.compile_mode and not (self.training and self._compiled_samples in (None, count_samples(x))):
            with torch.compiler.set_stance("force_eager"):
                return self.model(*args, **named)
        return self.model(*args, **named)

    @override
    def on_train_start(self) -> None:
        self._check_loaders("val")

    def unread_options(self) -> dict[str, str]:
        """Return the options that have changed nothing, and why: see summary.py."""
        has_convolution = any(isinstance(module, nn.Conv2d) for module in self.model.modules())
        unread = {} if has_convolution else {"channels_last": f"{type(self.model).__name__} has no 2-D convolution"}
        if self.samples_per_update is None:
            reason = "the data do not say how many samples a batch has"
            unread |= dict.fromkeys(("optimizer.lr_scaling", "optimizer.reference_batch_size"), reason)
        return unread

    def loss(self, output: Any, y: Any) -> Tensor:
        """Return the mean loss `()` of the network's output and the target, both with the shapes of a batch."""
        return self.loss_function(*for_loss(self.spec, output, y))

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters by the names that users know: names within the network, and those of the loss."""
        return [(name.removeprefix("model."), parameter) for name, parameter in self.named_parameters()]

    @override
    def on_validation_start(self) -> None:
        self._check_loaders("val")

    @override
    def on_test_start(self) -> None:
        self._check_loaders("test")
        self.test_correct = []

    def _check_loaders(self, stage: str) -> None:
        """Raise UserError for several loaders of a stage, whose metrics would share one name."""
        loaders = getattr(self.trainer, f"{stage}_dataloaders")
        if isinstance(loaders, list | tuple | dict) and len(loaders) > 1:
            raise UserError(
                f"data: has {len(loaders)} {stage} loaders, and a Task measures one set; join them by "
                "torch's ConcatDataset"
            )

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Do as Lightning, but scale the last update of an epoch, if it accumulates fewer batches, to the mean over them."""
        n = self.trainer.accumulate_grad_batches
        if n > 1:
            first_batch = self.trainer.fit_loop.batch_idx // n * n
            accumulated = min(n, self.trainer.num_training_batches - first_batch)
            loss = loss if accumulated == n else loss * (n / accumulated)
        super().backward(loss, *args, **kwargs)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        for norm in self._frozen_norms:
            if norm.training:  # not before the first step: Lightning would warn of modules in evaluation mode
                norm.eval()
        x, y, lengths = self._parts(batch)
        output = self(x, lengths) if self.is_tried else first_output(self, x, y, lengths)
        result = {"loss": self.loss(output, y)}
        if self.has_accuracy:
            result["acc"] = accuracy(self.spec, output.detach(), y)
        if (ranks := self.trainer.world_size) == 1:
            return result
        # The weight of this rank's mean over samples: its share of the samples of the global batch, times the ranks.
        sampler = getattr(self.trainer.train_dataloader, "batch_sampler", None)
        weight = sampler.weight(batch_idx) if hasattr(sampler, "weight") else 1
        return self._scaled(result, output, y, ranks, weight)

    def _scaled(self, means: dict[str, Tensor], output: Any, y: Tensor, ranks: int, weight: float) -> dict[str, Tensor]:
        """Scale the means of this rank, so that the mean over ranks is the mean of the global batch.

        A mean over samples is scaled by this rank's share of the samples. A mean over the steps or pixels that count is
        scaled by this rank's share of these; the ranks add up their counts on the device.
        """
        counts = {}
        if self.spec.has_padding and self.has_named_loss:
            counts["loss"] = (y != PADDING).sum()
        if self.has_accuracy and (is_counted := correct(self.spec, output.detach(), y)[1]) is not None:
            counts["acc"] = is_counted.sum()
        if not counts and weight == 1:
            return means
        weights: dict[str, Tensor | float] = {"loss": weight}
        if self.has_accuracy:
            weights["acc"] = weight
        if counts:
            rank_counts = torch.stack([*counts.values()]).float()
            totals = rank_counts.clone()
            torch.distributed.all_reduce(totals)
            weights |= dict(zip(counts, rank_counts * ranks / totals.clamp(min=1), strict=True))
            if "acc" in counts:  # without targets that count it is NaN: 0 if one rank has none, NaN if no rank has any
                means["acc"] = means["acc"].where((rank_counts[-1] > 0) | (totals[-1] == 0), 0.0)
        return {key: mean * weights[key] for key, mean in means.items()}

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Update `val/loss` and the other metrics; return what `test_step` returns."""
        return self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Update `test/loss` and the other metrics; return `input`, `output`, `target` and `loss` for callbacks."""
        return self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return `input` and `output` for a batch without targets: inputs alone, `(inputs,)` or `(inputs, lengths)`."""
        x, *lengths = batch if isinstance(batch, list | tuple) else (batch,)
        return {"input": x, "output": self(x, *lengths)}

    @override
    def configure_optimizers(self) -> Any:
        """Return torch's optimizer and, unless the rate is constant, its schedule."""
        recipe, samples = self.optimizer_recipe, self.samples_per_update
        sizes = {"batch_size": samples, "reference_batch_size": recipe.reference_batch_size}
        self.lr_scaling = {"rule": recipe.rule, **sizes} if samples and recipe.rule != "none" else None
        recipe = recipe.scaled_to(samples or recipe.reference_batch_size)
        optimizer = recipe.build(self.parameters())
        schedule = recipe.build_schedule(optimizer, self.trainer.estimated_stepping_batches)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": recipe.interval}}

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by `trainer.gradient_clip_val`, also under mixed precision.

        Under mixed precision Lightning refuses to clip with a fused optimizer: its `step` unscales the gradients, and scaled
        gradients must not be clipped. Here the scaler unscales the gradients first. The scaler remembers this until `step`,
        which then divides by no scale, and still skips the update if a gradient overflowed, without the host reading the device.
        """
        plugin = self.trainer.precision_plugin
        step_unscales = getattr(optimizer, "_step_supports_amp_scaling", False)  # by `found_inf` and `grad_scale`
        if not gradient_clip_val or not step_unscales or not isinstance(plugin, MixedPrecision):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if plugin.scaler is not None:  # bf16-mixed has none
            plugin.scaler.unscale_(optimizer)
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)  # MixedPrecision's method refuses

    def _parts(self, batch: Batch) -> Any:
        """Return `DataSpec.parts` of a batch; UnfitError for a first batch that lacks a field, which a user's loader may."""
        if not self.is_tried and (problem := missing_field(batch, self.spec)):
            raise UnfitError(f"data: a batch is not what the spec says: {problem}")
        return self.spec.parts(batch)

    def _evaluate(self, batch: Batch, stage: str) -> dict[str, Any]:
        x, y, lengths = self._parts(batch)
        samples = count_samples((x, y))
        output = self(x, lengths) if self.is_tried else first_output(self, x, y, lengths)
        loss = self.loss(output, y)
        # The loss is repeated for each sample or step that counts: with nan_strategy="disable" MeanMetric ignores weights.
        count = int((y != PADDING).sum()) if self.spec.has_padding and self.has_named_loss else samples
        metrics: dict[str, Metric] = self.measured[stage]
        metrics["loss"].update(loss.expand(count))
        for name, metric in metrics.items():
            if name == "acc" and self.has_accuracy:
                is_correct, is_counted = correct(self.spec, output, y)
                metric.update(is_correct.float() if is_counted is None else is_correct[is_counted].float())
                if stage == "test" and is_counted is None and self.spec.target == "class":
                    self.test_correct.append(is_correct)
            elif name != "loss":
                metric.update(*for_metrics(self.spec, output, y, metric))
            in_bar = name == "acc" and stage == "val"
            self.log(f"{stage}/{name}", metric, batch_size=samples, on_step=False, on_epoch=True, prog_bar=in_bar)
        return {"output": output, "input": x, "target": y, "loss": loss}

    def _build_metrics(self, metrics: Mapping[str, Metric]) -> dict[str, dict[str, Metric]]:
        """Return the metrics, with the means of loss and accuracy, by stage and name."""
        # Lightning's own mean over ranks rounds the number of samples: it is wrong if they do not divide evenly.
        means = ["loss", "acc"] if self.has_accuracy else ["loss"]
        return {
            stage: {name: _Mean(nan_strategy="disable") for name in means}
            | {name: metric.clone() for name, metric in metrics.items()}
            for stage in ("val", "test")
        }

    def _freeze(self, patterns: Sequence[str]) -> list[nn.Module]:
        """Freeze parameters by patterns of their names; return the batch norms whose parameters are all frozen."""
        # `fnmatch.filter` ignores case on Windows, and the names of parameters are case-sensitive.
        parameters = self._named_parameters()
        matches = {glob: {p for name, p in parameters if fnmatch.fnmatchcase(name, glob)} for glob in patterns}
        if unmatched := next((glob for glob, matched in matches.items() if not matched), None):
            suggestion = did_you_mean(unmatched, [name for name, _ in parameters])
            raise UserError(f"task.freeze: '{unmatched}' matches no parameter of the model.{suggestion}")
        frozen = {p for matched in matches.values() for p in matched}
        for parameter in frozen:
            parameter.requires_grad_(False)
        if frozen and not any(p.requires_grad for p in self.parameters()):
            raise UserError(f"task.freeze: got {list(patterns)}, which leaves no parameter to train")
        norms = [module for module in self.modules() if isinstance(module, BATCH_NORM)]
        return [norm for norm in norms if (affine := {*norm.parameters()}) and affine <= frozen]


class _Mean(MeanMetric):
    """A mean in float32; torchmetrics uses torch's default dtype, which Lightning sets to float16 or bfloat16."""

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float32


class _Metrics(nn.ModuleList):
    """Metrics that keep their dtypes if a module is converted to half precision: sums over samples need the precision."""

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return converted if converted.dtype == tensor.dtype else tensor.to(converted.device)

        return super()._apply(keep_dtype, recurse)


def _channels_last(x: Tensor | Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """Return the inputs with images channels-last; without torch's tree functions, which take 15 µs a step."""
    if isinstance(x, Mapping):
        return {name: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for name, t in x.items()}
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
