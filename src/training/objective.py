"""What a network is trained for and measured by: losses by name, the accuracy of classes, metrics of torchmetrics.

Shapes: B samples, T steps, N classes, labels or values; the targets are those of a DataSpec. One logit of two
classes (N = 1) comes to a loss and to metrics without N, as a value does.
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
    """The mean over the targets that are a class, of one logit for each; 0 where none is. Summed in float32 at least."""
    counts = y != PADDING
    each = F.binary_cross_entropy_with_logits(output, y.where(counts, 0.0), reduction="none")
    total = each.where(counts, 0.0).sum(dtype=torch.promote_types(each.dtype, torch.float32))
    return total / counts.sum().clamp(min=1)


def _of_numbers(function: LossFunction, output: Tensor, y: Tensor) -> Tensor:
    """A loss of torch, of targets in the type of the output, under autocast at least float32.

    Of others, such as whole numbers, it has no gradient.
    """
    least = torch.float32 if torch.is_autocast_enabled(output.device.type) else output.dtype
    return function(output, y.to(torch.promote_types(output.dtype, least)))


_OF_ONE_LOGIT: dict[str, LossFunction] = {"bce": _binary_cross_entropy}
_OF_CLASSES: dict[str, LossFunction] = {"cross_entropy": partial(F.cross_entropy, ignore_index=PADDING)}
_NUMBERS: dict[str, LossFunction] = {
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
}
_OF_NUMBERS: dict[str, LossFunction] = {name: partial(_of_numbers, function) for name, function in _NUMBERS.items()}


def loss_function(loss: Any, spec: DataSpec) -> tuple[str, LossFunction]:
    """The name of a loss, for errors, and the loss: one by name, or what a node has built, as it is."""
    if callable(loss):
        function = loss.func if isinstance(loss, partial) else loss
        return getattr(function, "__name__", type(function).__name__), loss
    own = _OF_ONE_LOGIT if spec.is_one_logit else _OF_CLASSES if spec.target in CLASSES else _OF_NUMBERS
    names = [*(["auto"] if spec.target != "any" else []), *own]
    if loss == "auto" and loss in names:
        loss = "mse" if spec.target in ("value", "vector", "input") else next(iter(own))
    if not isinstance(loss, str) or loss not in own:
        raise UserError(
            f"task.loss: got {loss!r}; for the data's target, {spec.target}, it takes {', '.join(names)} or a node "
            "with a _target_"
        )
    if loss == "cross_entropy" and spec.has_padding:
        return loss, _cross_entropy
    return loss, own[loss]


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """The mean over the targets that are a class; 0 where none is, of which torch's mean is NaN."""
    return F.cross_entropy(output, y, ignore_index=PADDING).where((y != PADDING).any(), 0.0)


def for_loss(spec: DataSpec, output: Any, y: Any) -> tuple[Any, Any]:
    """What a loss is called with: classes of steps as `(B·T, N)` and `(B·T,)`, values as `(B,)`, labels as numbers.

    One logit of two classes has no N, and its classes are numbers, too.
    """
    if not isinstance(output, Tensor) or spec.target == "any":
        return output, y
    if spec.target == "value" or spec.is_one_logit:
        output = spec.without_n(output)
    if spec.target == "class_per_step":
        output, y = output.flatten(0, y.dim() - 1), y.flatten()
    return output, y.to(output.dtype) if _are_numbers(spec) else y


def for_metrics(spec: DataSpec, output: Any, y: Any, metric: Metric) -> tuple[Any, Any]:
    """What a metric is updated with: as a loss; steps without a class are left out, labels are probabilities.

    A metric of torchmetrics.segmentation with `input_format="index"` is given the predicted classes.
    """
    if getattr(metric, "input_format", "") == "index" and spec.target in CLASSES and isinstance(output, Tensor):
        return spec.class_of(output), y
    output, y = for_loss(spec, output, y)
    if spec.target == "class_per_step":
        is_step = y != PADDING
        output, y = output[is_step], y[is_step]
    # torchmetrics takes scores for probabilities where all of a batch happen to lie between 0 and 1.
    return (output.sigmoid(), y.long()) if _are_numbers(spec) else (output, y)


def _are_numbers(spec: DataSpec) -> bool:
    """Whether logits of 0 or 1 are asked for, each by itself."""
    return spec.is_one_logit or spec.target in LABELS


def correct(spec: DataSpec, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which answers are right, and which targets ask for one: both in the shape of `y`. None: all ask."""
    found = spec.class_of(output)
    ignored = ([PADDING] if spec.has_padding else []) + ([] if spec.blank_class is None else [spec.blank_class])
    return found == y, torch.stack([y != one for one in ignored]).all(dim=0) if ignored else None


def accuracy(spec: DataSpec, output: Tensor, y: Tensor) -> Tensor:
    """The fraction of correct answers `()` of a training step, over the steps and pixels that ask for one."""
    right, asked = correct(spec, output, y)
    return right.float().mean() if asked is None else (right & asked).sum().float() / asked.sum()


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
            takes = "a node whose _target_ is a torchmetrics.Metric"
            raise UserError(f"task.metrics.{name}: got {type(metric).__name__}, takes {takes}")
    return found
