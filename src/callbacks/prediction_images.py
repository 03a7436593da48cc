"""PredictionImages: some test samples with the predicted classes or masks, and the confusion matrix, as images in the loggers."""

from typing import Annotated, Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from ..distributed.gather import gather
from ..options.types import PositiveInt, Where
from ..records.metrics import card
from ._batches import first_tensor
from ._never_raise import never_raise
from .tensorboard import TensorBoard

_LEFT_OUT = -100  # as torch's losses do
_MOST_NAMES = 20  # of classes that a confusion matrix has room for
_BLUE, _ORANGE = "#0072B2", "#D55E00"  # told apart by everybody (Okabe & Ito 2008)


class Sample(NamedTuple):
    """A test sample: its input, the predicted and the true class `()`, or those of its pixels `(H, W)`; on the CPU."""

    x: Tensor
    answer: Tensor
    target: Tensor

    @property
    def is_wrong(self) -> bool:
        """Whether another class was predicted for all of it."""
        return bool((self.answer != self.target).all())


class PredictionImages(Callback):
    """Draws the classes that `test_step` returned: `output` of shape `(N, C)` and `target`, integers of shape `(N,)`.

    Classes of pixels, `(N, C, H, W)` and `(N, H, W)`, are drawn as masks beside their images. Any other step is left alone.
    The input is the first tensor of what the step returned as `input`, or of the batch. A
    target of -100, which torch's losses leave out, is not drawn.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `test/samples` | image | samples with target and prediction, mistakes first |
    | `test/confusion` | image | rows are the true classes, columns the predicted ones |

    A module may have a `spec` with `classes`, `mean` and `std`, for names and true colours. After the test `samples` has
    the samples of this rank, and `confusion` the counts of all ranks, shape (C, C).

    Args:
        num_samples: how many samples are drawn.
    """

    observes_only = True

    def __init__(self, num_samples: Annotated[PositiveInt, Where("test", (True,))] = 16):
        self.num_samples = num_samples
        self.samples: list[Sample] = []
        self._metric: MulticlassConfusionMatrix | None = None
        self._active = False

    @property
    def confusion(self) -> Tensor | None:
        """The counts so far, shape (C, C); None before the first batch."""
        return None if self._metric is None else self._metric.confmat

    def unread_options(self) -> dict[str, str]:
        """The options that have changed nothing, and why."""
        why = "no test step has answered classes of samples or pixels"
        return {"num_samples": why} if self._metric is None else {}

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.samples, self._metric, self._active = [], None, True

    def disable(self) -> None:
        """Draw nothing in this test."""
        self.samples, self._metric, self._active = [], None, False

    @override
    @never_raise
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *indices: int
    ) -> None:
        found = _answers(outputs, batch) if self._active else None
        if found is None:
            return
        x, output, target = found
        answer = output.argmax(1)
        if self._metric is None:
            self._metric = MulticlassConfusionMatrix(output.shape[1], ignore_index=_LEFT_OUT).to(output.device)
        self._metric.update(answer, target)
        if sum(sample.is_wrong for sample in self.samples) < self.num_samples:
            kept, wrong = ((found.reshape(len(target), -1)) for found in (target != _LEFT_OUT, answer != target))
            order = (kept.any(1).int() + (kept & wrong).all(1)).argsort(descending=True, stable=True)
            first = order[: min(self.num_samples, int(kept.any(1).sum()))].tolist()
            self.samples += [Sample(x[i].cpu(), answer[i].cpu(), target[i].cpu()) for i in first]
            self.samples = sorted(self.samples, key=lambda sample: not sample.is_wrong)[: self.num_samples]

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = gather(None if self.confusion is None else self.confusion.cpu(), trainer.world_size)
        if self._metric is not None and all(counts is not None for counts in ranks):  # else a rank has drawn nothing
            self._metric.confmat = torch.stack(ranks).sum(0)
            self._draw(trainer, pl_module, self._metric)

    @never_raise
    def _draw(self, trainer: Trainer, pl_module: LightningModule, metric: MulticlassConfusionMatrix) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger | WandbLogger)]
        if not self.samples or not loggers or not trainer.is_global_zero:
            return
        spec = getattr(pl_module, "spec", None)
        figures = {
            "test/samples": _draw_samples(self.samples, spec),
            "test/confusion": _draw_confusion(metric, spec),
        }
        for key, figure in figures.items():
            for logger in loggers:
                if isinstance(logger, WandbLogger):
                    logger.log_image(key, [figure])
                else:
                    name = card(key) if isinstance(logger, TensorBoard) else key
                    logger.experiment.add_figure(name, figure, trainer.global_step, close=False)


def _answers(outputs: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """The input, the output and the target of a step that can be drawn; None of any other step."""
    output, target = (outputs.get(key) if isinstance(outputs, dict) else None for key in ("output", "target"))
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    x = first_tensor(outputs.get("input", batch))
    if output.dim() != target.dim() + 1 or output.shape[:1] + output.shape[2:] != target.shape or output.shape[1] < 2:
        return None
    if not isinstance(x, Tensor) or not x.dim() or len(x) != len(target):
        return None
    is_mask = target.dim() == 3 and x.dim() == 4 and x.shape[2:] == target.shape[1:]
    return (x, output, target) if target.dim() == 1 or is_mask else None


def _draw_samples(samples: list[Sample], spec: Any) -> Figure:
    """One small picture a sample; below those of masks the true classes and the predicted ones, one colour a class."""
    rows = ("image", "true", "predicted") if samples[0].target.dim() else ("image",)
    columns = min(8, len(samples))
    blocks = -(-len(samples) // columns)
    figure = Figure(figsize=(1.25 * columns, 1.4 * len(rows) * blocks), layout="constrained", dpi=120)
    axes = figure.subplots(len(rows) * blocks, columns, squeeze=False)
    most = max(int(mask.max()) for sample in samples for mask in (sample.answer, sample.target))
    look = {"cmap": "viridis", "vmin": 0, "vmax": max(1, most), "interpolation": "nearest"}
    for each in axes.flat:
        each.set(xticks=[], yticks=[], frame_on=False)
    for index, sample in enumerate(samples):
        block, column = divmod(index, columns)
        image, *masks = axes[len(rows) * block : len(rows) * (block + 1), column]
        image.imshow(_as_image(sample.x, spec).numpy(), cmap="gray", interpolation="nearest")
        for place, mask, name in zip(masks, (sample.target, sample.answer), rows[1:], strict=False):
            place.imshow(mask.where(sample.target != _LEFT_OUT, torch.nan).numpy(), **look)
            place.set_ylabel(name if column == 0 else "", fontsize=8)
        if not masks:
            answer, target = _class_name(int(sample.answer), spec), _class_name(int(sample.target), spec)
            text = f"{answer}, is {target}" if sample.is_wrong else answer
            image.set_title(text, fontsize=8, color=_ORANGE if sample.is_wrong else _BLUE)
    return figure


def _draw_confusion(metric: MulticlassConfusionMatrix, spec: Any) -> Figure:
    classes = len(metric.confmat)
    has_names = classes <= _MOST_NAMES
    figure = Figure(figsize=(0.6 * classes + 3,) * 2 if has_names else (8, 8), layout="constrained", dpi=120)
    labels = [_class_name(index, spec) for index in range(classes)]
    metric.plot(metric.confmat, figure.subplots(), add_text=has_names, labels=labels, cmap="Blues")
    if not has_names:
        figure.axes[0].set(xticks=[], yticks=[])
    return figure


def _as_image(x: Tensor, spec: Any) -> Tensor:
    """An image `(C, H, W)`, a sequence `(T, F)` or numbers of any other shape as something that imshow takes."""
    are_bytes = x.dtype == torch.uint8
    x = x.float() / 255 if are_bytes else x.float()  # numpy has no bfloat16
    if x.dim() not in (2, 3):
        return x.reshape(1, -1)
    if x.dim() == 2:
        side = int(x.numel() ** 0.5)
        return x.view(side, side) if x.shape[1] == 1 and side * side == x.numel() else x
    if getattr(spec, "mean", ()) and not are_bytes:
        x = x * torch.tensor(spec.std).view(-1, 1, 1) + torch.tensor(spec.mean).view(-1, 1, 1)
    return x.permute(1, 2, 0).clamp(0, 1) if x.shape[0] == 3 else x[0]


def _class_name(index: int, spec: Any) -> str:
    names = getattr(spec, "classes", ())
    name = names[index] if index < len(names) else str(index)
    return name.split(" - ")[0]  # torchvision's MNIST calls its classes "7 - seven"
