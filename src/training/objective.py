"""Losses by name, the accuracy of classes, and metrics of torchmetrics.

Shapes: B samples, T steps, N classes, labels or values; the targets are those of a DataSpec. A loss and a metric get the
logit of two classes (N = 1) without the dimension N, like a value.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from ..data.spec import CLASSES, LABELS, PADDING, DataSpec
from ..errors import UserError

LossFunction = Callable[[Any, Tensor], Any]


def _binary_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the targets that are not padding, of one logit each; 0 without any. Sums in at least float32."""
    is_class = y != PADDING
    losses = F.binary_cross_entropy_with_logits(output, y.where(is_class, 0.0), reduction="none")
    total = losses.where(is_class, 0.0).sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return total / is_class.sum().clamp(min=1)


def _with_float_targets(function: LossFunction, output: Tensor, y: Tensor) -> Tensor:
    """Return a loss of torch with the targets in the dtype of the output, under autocast in at least float32.

    With targets of another dtype, such as integers, torch's loss has no gradient.
    """
    least_dtype = torch.float32 if torch.is_autocast_enabled(output.device.type) else output.dtype
    return function(output, y.to(torch.promote_types(output.dtype, least_dtype)))


_LOGIT_LOSSES: dict[str, LossFunction] = {"bce": _binary_cross_entropy}  # of one logit for two classes
_CLASS_LOSSES: dict[str, LossFunction] = {"cross_entropy": partial(F.cross_entropy, ignore_index=PADDING)}
_TORCH_LOSSES: dict[str, LossFunction] = {
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
}
_VALUE_LOSSES = {name: partial(_with_float_targets, function) for name, function in _TORCH_LOSSES.items()}


def loss_function(loss: Any, spec: DataSpec) -> tuple[str, LossFunction]:
    """Return the name of a loss, for errors, and the function: the loss of this name, or what a node has built."""
    if callable(loss):
        function = loss.func if isinstance(loss, partial) else loss
        return getattr(function, "__name__", type(function).__name__), loss
    losses = _LOGIT_LOSSES if spec.is_one_logit else _CLASS_LOSSES if spec.target in CLASSES else _VALUE_LOSSES
    names = [*(["auto"] if spec.target != "any" else []), *losses]
    if loss == "auto" and loss in names:
        loss = "mse" if spec.target in ("value", "vector", "input") else next(iter(losses))
    if not isinstance(loss, str) or loss not in losses:
        raise UserError(
            f"task.loss: got {loss!r}; for the data's target, {spec.target}, it takes {', '.join(names)} or a node "
            "with a _target_"
        )
    if loss == "cross_entropy" and spec.has_padding:
        return loss, _cross_entropy
    return loss, losses[loss]


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the targets that are not padding; 0 without any, where torch's mean is NaN."""
    return F.cross_entropy(output, y, ignore_index=PADDING).where((y != PADDING).any(), 0.0)


def for_loss(spec: DataSpec, output: Any, y: Any) -> tuple[Any, Any]:
    """Return output and target as a loss gets them: classes of steps as `(B·T, N)` and `(B·T,)`, values as `(B,)`.

    The logit of two classes has no dimension N. Its classes, and labels, have the dtype of the output.
    """
    if not isinstance(output, Tensor) or spec.target == "any":
        return output, y
    if spec.target == "value" or spec.is_one_logit:
        output = spec.without_n(output)
    if spec.target == "class_per_step":
        output, y = output.flatten(0, y.dim() - 1), y.flatten()
    return output, y.to(output.dtype) if _has_binary_targets(spec) else y


def for_metrics(spec: DataSpec, output: Any, y: Any, metric: Metric) -> tuple[Any, Any]:
    """Return output and target as a metric gets them: as a loss, without padded steps; binary logits as probabilities.

    A metric of torchmetrics.segmentation with `input_format="index"` gets the predicted classes.
    """
    if getattr(metric, "input_format", "") == "index" and spec.target in CLASSES and isinstance(output, Tensor):
        return spec.class_of(output), y
    output, y = for_loss(spec, output, y)
    if spec.target == "class_per_step":
        is_step = y != PADDING
        output, y = output[is_step], y[is_step]
    # torchmetrics treats scores as probabilities if all scores of a batch happen to lie between 0 and 1.
    return (output.sigmoid(), y.long()) if _has_binary_targets(spec) else (output, y)


def _has_binary_targets(spec: DataSpec) -> bool:
    """Whether each logit has a target of 0 or 1 of its own."""
    return spec.is_one_logit or spec.target in LABELS


def correct(spec: DataSpec, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return masks in the shape of `y`: the correct predictions, and the targets that count; None if all count."""
    predicted = spec.class_of(output)
    ignored = ([PADDING] if spec.has_padding else []) + ([] if spec.blank_class is None else [spec.blank_class])
    is_counted = torch.stack([y != ignored_class for ignored_class in ignored]).all(dim=0) if ignored else None
    return predicted == y, is_counted


def accuracy(spec: DataSpec, output: Tensor, y: Tensor) -> Tensor:
    """Return the accuracy `()` of a training step, over the steps and pixels that count."""
    is_correct, mask = correct(spec, output, y)
    return is_correct.float().mean() if mask is None else (is_correct & mask).sum().float() / mask.sum()


def selected_metrics(configured: Mapping[str, Any] | None) -> dict[str, Metric]:
    """Return the metrics of a configuration, without those that are null.

    Raises:
        UserError: for a metric that is no Metric of torchmetrics, and for the name `loss`.
    """
    metrics = {name: metric for name, metric in (configured or {}).items() if metric is not None}
    for name, metric in metrics.items():
        if name == "loss":
            raise UserError("task.metrics.loss: is the name of the loss; choose another one")
        if not isinstance(metric, Metric):
            expected = "a node whose _target_ is a torchmetrics.Metric"
            raise UserError(f"task.metrics.{name}: got {type(metric).__name__}, takes {expected}")
    return metrics
