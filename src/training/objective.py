"""What a network is trained for and measured by: losses by name, the accuracy of classes, metrics of torchmetrics.

Shapes: B samples, T steps, N classes, labels or values; the targets are those of a DataSpec.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from ..data.spec import CLASSES, PADDING, DataSpec
from ..errors import UserError

LossFunction = Callable[[Any, Tensor], Any]
_OF_CLASSES: dict[str, LossFunction] = {"cross_entropy": partial(F.cross_entropy, ignore_index=PADDING)}
_OF_NUMBERS: dict[str, LossFunction] = {
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
}


def loss_function(loss: Any, spec: DataSpec) -> tuple[str, LossFunction]:
    """The name of a loss, for errors, and the loss: one by name, or what a node has built, as it is."""
    if callable(loss):
        function = loss.func if isinstance(loss, partial) else loss
        return getattr(function, "__name__", type(function).__name__), loss
    own = _OF_CLASSES if spec.target in CLASSES else _OF_NUMBERS
    if loss == "auto":
        loss = "cross_entropy" if own is _OF_CLASSES else "bce" if spec.target == "multilabel" else "mse"
    if not isinstance(loss, str) or loss not in own:
        raise UserError(
            f"task.loss: got {loss!r}; for the data's target, {spec.target}, it takes {', '.join(['auto', *own])} or a node "
            "with a _target_"
        )
    if loss == "cross_entropy" and (spec.target == "class_per_pixel" or spec.variable_length):
        return loss, _cross_entropy
    return loss, own[loss]


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """The mean over the targets that are a class; 0 where none is, of which torch's mean is NaN."""
    return F.cross_entropy(output, y, ignore_index=PADDING).where((y != PADDING).any(), 0.0)


def for_loss(spec: DataSpec, output: Any, y: Tensor) -> tuple[Any, Tensor]:
    """What a loss is called with: classes of steps as `(B·T, N)` and `(B·T,)`, values as `(B,)`, labels as numbers."""
    if not isinstance(output, Tensor):
        return output, y
    if spec.target == "value":
        return output.squeeze(-1) if output.dim() > y.dim() else output, y
    if spec.target == "class_per_step":
        return output.flatten(0, -2), y.flatten()
    return output, y.to(output.dtype) if spec.target == "multilabel" else y


def for_metrics(spec: DataSpec, output: Any, y: Tensor) -> tuple[Any, Tensor]:
    """What a metric is updated with: as a loss; steps behind a sequence's end are left out, labels are probabilities."""
    output, y = for_loss(spec, output, y)
    if spec.pads_steps:
        is_step = y != PADDING
        return output[is_step], y[is_step]
    # torchmetrics takes scores for probabilities where all of a batch happen to lie between 0 and 1.
    return (output.sigmoid(), y.long()) if spec.target == "multilabel" else (output, y)


def correct(spec: DataSpec, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which answers are right, and which targets ask for one: both in the shape of `y`. None: all ask."""
    found = output.argmax(dim=1 if spec.target == "class_per_pixel" else -1)
    ignored = ([PADDING] if spec.has_padding else []) + ([] if spec.blank_class is None else [spec.blank_class])
    return found == y, torch.stack([y != one for one in ignored]).all(dim=0) if ignored else None


def accuracy(spec: DataSpec, output: Tensor, y: Tensor) -> Tensor:
    """The fraction of correct answers `()` of a training step, over the steps and pixels that ask for one."""
    right, asked = correct(spec, output, y)
    return right.float().mean() if asked is None else (right & asked).sum() / asked.sum()


def own_metrics(given: Mapping[str, Any] | None) -> dict[str, Metric]:
    """The metrics of a configuration, without those that are null.

    Raises:
        UserError: for one that is no Metric of torchmetrics, and for a name that is taken.
    """
    found = {name: metric for name, metric in (given or {}).items() if metric is not None}
    for name, metric in found.items():
        if name == "loss":
            raise UserError("task.metrics.loss: is the name of the loss; choose another one")
        if not isinstance(metric, Metric):
            kind = type(metric).__name__
            raise UserError(f"task.metrics.{name}: got a {kind}, takes a node whose _target_ is a torchmetrics.Metric")
    return found
