"""Task: the one LightningModule. It joins a model, a loss, metrics and an optimizer."""

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
from ..callbacks._batches import samples_in
from ..data.collate import missing_field
from ..data.spec import CLASSES, LENGTHS, PADDING, DataSpec, arguments, computed_shape, takes
from ..errors import UnfitError, UserError, did_you_mean
from ..options.types import Node, Text
from .objective import accuracy, correct, for_loss, for_metrics, loss_function, own_metrics
from .optimizer import Optimizer
from .trial import first_answer

Batch = Any  # what a DataSpec takes apart: `(x, y)`, `(x, y, lengths)` or a dict


class Task(LightningModule):
    """Trains any network on any data with a DataSpec.

    A training step returns `loss` and, for classes, `acc` as tensors that stay on the device: callbacks read them when
    they are ready. Under DDP each rank scales them by its share of the global batch, or of the steps and pixels in it
    that count, so that the mean over ranks is the global mean.

    Where sequences vary in length, the padding behind their ends counts in no loss and no accuracy.

    A subclass (`task._target_`) may override `loss` and Lightning's hooks, and has options of its own beside
    `**kwargs`.

    Args:
        model: its forward takes the input `(B, …)`, and `lengths: (B,)` where they vary; it answers as the target of
            the spec says, or what the loss takes.
        spec: of the data.
        optimizer: builds torch's optimizer and schedule.
        channels_last: store images and convolutions channels-last on CPU and CUDA, where that layout is faster.
        compile_mode: torch.compile's, for the network in training; None to run it as it is. Only whole batches run the
            compiled network, so that it is compiled once: the short last batch of an epoch, validation and test run it
            as it is. Checkpoints have the same names either way.
        loss: by its name, `auto` for that of the data's target, or a function or module of `(output, target)` that
            returns the mean over a batch. Classes of steps come to it as `(B·T, N)` and `(B·T,)`, a value as `(B,)` and
            `(B,)`, one logit of two classes without its dimension N and with the classes as numbers, anything else as
            the network and the data give it; −100 is no class.
        metrics: by name; each is logged as `val/NAME` and `test/NAME` of a whole set.
            It is updated with what the loss gets; labels come as probabilities and integers.
        freeze: name patterns, as of fnmatch, of parameters of the network that are not trained. Batch norm whose
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
        # Of all ranks and accumulated batches; None where nobody knows, and the rate stays as it is.
        self.samples_per_update: int | None = None
        self.lr_scaling: dict[str, Any] | None = None  # for the record: see records/learning_rate.py
        self.compile_mode = compile_mode
        self._compiled_samples: int | None = None  # of the batches that run the compiled network; None: of all
        self.channels_last = channels_last and any(isinstance(m, nn.Conv2d) for m in model.modules())
        if type(self).loss is Task.loss or loss != "auto" or spec.target != "any":
            self.loss_name, self.loss_function = loss_function(loss, spec)
        if type(self).loss is not Task.loss:
            self.loss_name = f"{type(self).__name__}.loss"
        # Its mean is over the targets that count; that of any other loss is over the samples.
        self.has_named_loss = isinstance(loss, str) and type(self).loss is Task.loss
        self.has_accuracy = spec.target in CLASSES and "acc" not in (metrics or {})
        self.is_tried = False  # whether network, loss and metrics are known to fit the data
        self.input_dtype = ""  # of the first input: `uint8`; empty until a batch was tried
        self.tested_right: list[Tensor] = []  # (B,) bool for each batch of the test, where a sample has one class
        self.is_of_zoo = type(model).__module__.startswith("batchscope.models.")  # whose activations are small
        self._takes_lengths = takes(model, LENGTHS)
        self.measured = self._metrics(own_metrics(metrics))
        self._metric_modules = _Metrics(m for stage in self.measured.values() for m in stage.values())
        self._frozen_norms = self._freeze(freeze)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # set 44 times a step by Lightning, at 1.3 µs each by torch's way
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a sample as the network computes on it: that of the data, unless the model says that it resizes it."""
        return computed_shape(self.model, self.spec)

    @property
    def sample_means(self) -> list[str]:
        """The names of the metrics that are means over samples, steps or pixels, and not over classes."""
        return [name for name, one in self.measured["test"].items() if getattr(one, "average", "micro") == "micro"]

    def prepare(self, trainer: Trainer, batch_size: int | None, samples_per_update: int | None) -> None:
        """Prepare for a fit. This is no hook of Lightning, because a subclass may override those without `super()`.

        Args:
            trainer: of the fit.
            batch_size: the samples of a whole batch, which runs the compiled network; None for all batches.
            samples_per_update: of all ranks and accumulated batches; None to leave the learning rate as it is.
        """
        self._compiled_samples, self.samples_per_update = batch_size, samples_per_update
        self._lay_out(trainer)
        if self.compile_mode:
            self.model.compile(mode=self.compile_mode, dynamic=False)

    @override
    def setup(self, stage: str) -> None:
        self._lay_out(self.trainer)

    def _lay_out(self, trainer: Trainer) -> None:
        # MPS is no faster with channels-last.
        self.channels_last = self.channels_last and trainer.strategy.root_device.type in ("cpu", "cuda")
        if self.channels_last:
            lay_out_channels_last(self.model)

    def forward(self, x: Tensor | Mapping[str, Tensor], lengths: Tensor | None = None) -> Tensor:
        """The model's output for inputs `x: (B, …)`, or several by their names, of `lengths: (B,)` if these vary."""
        if self.channels_last:
            x = _channels_last(x)
        args, named = arguments(x, lengths if self._takes_lengths else None)
        if self.compile_mode and not (self.training and self._compiled_samples in (None, samples_in(x))):
            with torch.compiler.set_stance("force_eager"):
                return self.model(*args, **named)
        return self.model(*args, **named)

    @override
    def on_train_start(self) -> None:
        self._check_loaders("val")

    def unread_options(self) -> dict[str, str]:
        """See summary.py."""
        has_convolution = any(isinstance(module, nn.Conv2d) for module in self.model.modules())
        unread = {} if has_convolution else {"channels_last": f"{type(self.model).__name__} has no 2-D convolution"}
        if self.samples_per_update is None:
            why = "the data do not say how many samples a batch has"
            unread |= dict.fromkeys(("optimizer.lr_scaling", "optimizer.reference_batch_size"), why)
        return unread

    def loss(self, output: Any, y: Any) -> Tensor:
        """The mean loss `()` of what the network answers and the target, both with the shapes of a batch."""
        return self.loss_function(*for_loss(self.spec, output, y))

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by the names that users know: those within the network, and those of the loss."""
        return [(name.removeprefix("model."), parameter) for name, parameter in self.named_parameters()]

    @override
    def on_validation_start(self) -> None:
        self._check_loaders("val")

    @override
    def on_test_start(self) -> None:
        self._check_loaders("test")
        self.tested_right = []

    def _check_loaders(self, stage: str) -> None:
        """Raise UserError for several loaders of a stage, whose numbers would have one name."""
        loaders = getattr(self.trainer, f"{stage}_dataloaders")
        if isinstance(loaders, list | tuple | dict) and len(loaders) > 1:
            raise UserError(
                f"data: has {len(loaders)} {stage} loaders, and a Task measures one set; join them by "
                "torch's ConcatDataset"
            )

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """As Lightning, but the last update of an epoch, which may accumulate fewer batches, is the mean over these."""
        n = self.trainer.accumulate_grad_batches
        if n > 1:
            first = self.trainer.fit_loop.batch_idx // n * n
            held = min(n, self.trainer.num_training_batches - first)
            loss = loss if held == n else loss * (n / held)
        super().backward(loss, *args, **kwargs)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        for norm in self._frozen_norms:
            if norm.training:  # until the first step: Lightning warns of modules that are in evaluation mode before
                norm.eval()
        x, y, lengths = self._parts(batch)
        output = self(x, lengths) if self.is_tried else first_answer(self, x, y, lengths)
        result = {"loss": self.loss(output, y)}
        if self.has_accuracy:
            result["acc"] = accuracy(self.spec, output.detach(), y)
        if (ranks := self.trainer.world_size) == 1:
            return result
        # Of this rank's mean over samples: its share of the samples of the global batch, times the ranks.
        sampler = getattr(self.trainer.train_dataloader, "batch_sampler", None)
        weight = sampler.weight(batch_idx) if hasattr(sampler, "weight") else 1
        return self._shares(result, output, y, ranks, weight)

    def _shares(self, means: dict[str, Tensor], output: Any, y: Tensor, ranks: int, weight: float) -> dict[str, Tensor]:
        """The means of this rank, scaled so that the mean over ranks is that of the global batch.

        Loss and accuracy over samples are scaled by this rank's share of them. Over steps or pixels, of which some do
        not count, they are scaled by the share of those that do; the ranks add these up on the device.
        """
        counts = {}
        if self.spec.has_padding and self.has_named_loss:
            counts["loss"] = (y != PADDING).sum()
        if self.has_accuracy and (asked := correct(self.spec, output.detach(), y)[1]) is not None:
            counts["acc"] = asked.sum()
        if not counts and weight == 1:
            return means
        shares: dict[str, Tensor | float] = {"loss": weight}
        if self.has_accuracy:
            shares["acc"] = weight
        if counts:
            own = torch.stack([*counts.values()]).float()
            total = own.clone()
            torch.distributed.all_reduce(total)
            shares |= dict(zip(counts, own * ranks / total.clamp(min=1), strict=True))
            if "acc" in counts:  # without any answer it is NaN: on one rank that is nothing, on all of them it stays
                means["acc"] = means["acc"].where((own[-1] > 0) | (total[-1] == 0), 0.0)
        return {key: mean * shares[key] for key, mean in means.items()}

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Adds to `val/loss` and the other metrics; returns what `test_step` returns."""
        return self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Adds to `test/loss` and the other metrics; returns `input`, `output`, `target` and `loss` for callbacks."""
        return self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The answers to inputs without targets, alone, as `(inputs,)` or `(inputs, lengths)`: `input` and `output`."""
        x, *lengths = batch if isinstance(batch, list | tuple) else (batch,)
        return {"input": x, "output": self(x, *lengths)}

    @override
    def configure_optimizers(self) -> Any:
        """Torch's optimizer and, unless the rate is constant, its schedule."""
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

        Lightning refuses that for fused optimizers: their `step` unscales the gradients, and scaled gradients must not
        be clipped. Here the scaler unscales them before. It remembers that until `step`, which then divides by no scale
        and still skips the update where a gradient overflowed, without the host reading the device.
        """
        plugin = self.trainer.precision_plugin
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)  # in `step`, by `found_inf` and `grad_scale`
        if not gradient_clip_val or not unscales or not isinstance(plugin, MixedPrecision):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if plugin.scaler is not None:  # there is none at bf16-mixed
            plugin.scaler.unscale_(optimizer)
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)  # MixedPrecision's own refuses

    def _parts(self, batch: Batch) -> Any:
        """As `DataSpec.parts`; UnfitError for a first batch that lacks a field, as those of anybody's loader may."""
        if not self.is_tried and (wrong := missing_field(batch, self.spec)):
            raise UnfitError(f"data: a batch is not what the spec says: {wrong}")
        return self.spec.parts(batch)

    def _evaluate(self, batch: Batch, stage: str) -> dict[str, Any]:
        x, y, lengths = self._parts(batch)
        samples = samples_in((x, y))
        output = self(x, lengths) if self.is_tried else first_answer(self, x, y, lengths)
        loss = self.loss(output, y)
        # One value a sample, or a step of different lengths: torchmetrics ignores weights where it may not look for
        # NaN.
        weights = int((y != PADDING).sum()) if self.spec.has_padding and self.has_named_loss else samples
        measured: dict[str, Metric] = self.measured[stage]
        measured["loss"].update(loss.expand(weights))
        for name, metric in measured.items():
            if name == "acc" and self.has_accuracy:
                right, asked = correct(self.spec, output, y)
                metric.update(right.float() if asked is None else right[asked].float())
                if stage == "test" and asked is None and self.spec.target == "class":
                    self.tested_right.append(right)
            elif name != "loss":
                metric.update(*for_metrics(self.spec, output, y, metric))
            in_bar = name == "acc" and stage == "val"
            self.log(f"{stage}/{name}", metric, batch_size=samples, on_step=False, on_epoch=True, prog_bar=in_bar)
        return {"output": output, "input": x, "target": y, "loss": loss}

    def _metrics(self, own: Mapping[str, Metric]) -> dict[str, dict[str, Metric]]:
        """By stage and name."""
        # Lightning's own mean over ranks rounds the number of samples: it is wrong where they do not divide evenly.
        means = ["loss", "acc"] if self.has_accuracy else ["loss"]
        return {
            stage: {name: _Mean(nan_strategy="disable") for name in means}
            | {name: metric.clone() for name, metric in own.items()}
            for stage in ("val", "test")
        }

    def _freeze(self, patterns: Sequence[str]) -> list[nn.Module]:
        """Freeze parameters by their names, and return the batch norms that have no other ones."""
        # `fnmatch.filter` ignores the case on Windows, and the names of parameters have one.
        matched = {one: {p for name, p in self.named() if fnmatch.fnmatchcase(name, one)} for one in patterns}
        if unknown := next((one for one, found in matched.items() if not found), None):
            near = did_you_mean(unknown, [name for name, _ in self.named()])
            raise UserError(f"task.freeze: '{unknown}' matches no parameter of the model.{near}")
        frozen = {p for found in matched.values() for p in found}
        for parameter in frozen:
            parameter.requires_grad_(False)
        if frozen and not any(p.requires_grad for p in self.parameters()):
            raise UserError(f"task.freeze: got {list(patterns)}, which leaves no parameter to train")
        norms = [module for module in self.modules() if isinstance(module, BATCH_NORM)]
        return [norm for norm in norms if (own := {*norm.parameters()}) and own <= frozen]


class _Mean(MeanMetric):
    """A mean in float32; torchmetrics takes torch's default type, which Lightning sets to that of half precision."""

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float32


class _Metrics(nn.ModuleList):
    """Metrics, which keep their types where a module is converted to half precision: sums over samples need them."""

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def kept(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(kept, recurse)


def _channels_last(x: Tensor | Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """Images channels-last, and all else as it is; a plain call, because torch's tree functions take 15 µs a step."""
    if isinstance(x, Mapping):
        return {
            name: each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for name, each in x.items()
        }
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
