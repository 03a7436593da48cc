"""PredictionImages: some test samples with the model's predictions, and the confusion matrix, as TensorBoard images."""

from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from ..options.types import PositiveInt
from ._batches import first_tensor
from ._never_raise import never_raise

_LEFT_OUT = -100  # as torch's losses do
_MOST_NAMES = 20  # of classes that a confusion matrix has room for
_BLUE, _ORANGE = "#0072B2", "#D55E00"  # told apart by everybody (Okabe & Ito 2008)


class Sample(NamedTuple):
    """A test sample on the CPU: its input, the predicted and the true class (or classes of its steps, or values)."""

    is_wrong: bool  # of classes only
    x: Tensor
    answer: Tensor
    target: Tensor


class PredictionImages(Callback):
    """Draws what `test_step` returned as `output` and `target`, where the shapes are those of a known kind.

    | `output` | `target` | Images |
    | --- | --- | --- |
    | `(N, C)` | integers `(N,)` | samples and the confusion matrix |
    | `(N, T, C)` | integers `(N, T)` | samples |
    | N values | N values | samples |

    Any other step is left alone. The input is what the step returned as `input`, or the first tensor of the batch. A
    target of -100, which torch's losses leave out, is not drawn.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `test/samples` | image | samples with target and prediction, mistakes first |
    | `test/confusion` | image | rows are the true classes, columns the predicted ones |

    A module may have a `spec` with `classes`, `mean` and `std`, for names and true colours. After the test `samples` has
    the samples, and `confusion` the counts, shape (C, C).

    Args:
        num_samples: how many samples are drawn.
    """

    observes_only = True

    def __init__(self, num_samples: PositiveInt = 16):
        self.num_samples = num_samples
        self.samples: list[Sample] = []
        self.confusion: Tensor | None = None
        self._active = False

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.samples, self.confusion, self._active = [], None, True

    def disable(self) -> None:
        """Draw nothing in this test."""
        self.samples, self._active = [], False

    @override
    @never_raise
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *indices: int
    ) -> None:
        found = _answers(outputs, batch) if self._active else None
        if found is None:
            return
        x, output, target = found
        answer = output.reshape(len(x)) if target.is_floating_point() else output.argmax(-1)
        target = target.reshape(len(x)) if target.is_floating_point() else target
        wrong = torch.zeros(len(x), dtype=torch.bool, device=output.device)
        if output.dim() == 2 and not target.is_floating_point():
            wrong = (answer != target) & (target != _LEFT_OUT)
            metric = MulticlassConfusionMatrix(output.shape[1], ignore_index=_LEFT_OUT).to(output.device)
            metric.update(answer, target)
            self.confusion = metric.confmat if self.confusion is None else self.confusion + metric.confmat
        if sum(sample.is_wrong for sample in self.samples) < self.num_samples:
            for i in wrong.int().argsort(descending=True, stable=True)[: self.num_samples].tolist():
                if (target[i] != _LEFT_OUT).any():
                    self.samples.append(Sample(bool(wrong[i]), x[i].cpu(), answer[i].cpu(), target[i].cpu()))
            self.samples = sorted(self.samples, key=lambda sample: not sample.is_wrong)[: self.num_samples]

    @override
    @never_raise
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        online = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        if not self.samples or not (writers or online) or not trainer.is_global_zero:
            return
        spec = getattr(pl_module, "spec", None)
        figures = {"test/samples": _draw_samples(self.samples, spec)}
        if self.confusion is not None:
            figures["test/confusion"] = _draw_confusion(self.confusion, spec)
        for key, figure in figures.items():
            for logger in online:
                logger.log_image(key, [figure])
            for writer in writers:
                writer.add_figure(key, figure, trainer.global_step, close=False)


def _answers(outputs: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """The input, the output and the target of a step that can be drawn; None of any other step."""
    output, target = (outputs.get(key) if isinstance(outputs, dict) else None for key in ("output", "target"))
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or not target.dim():
        return None
    x = outputs.get("input", first_tensor(batch))
    if not isinstance(x, Tensor) or not x.dim() or len(x) != len(target):
        return None
    are_values = target.is_floating_point() and output.numel() == target.numel() == len(target)
    are_classes = (
        not target.is_floating_point()
        and target.dim() <= 2
        and output.dim() == target.dim() + 1
        and output.shape[:-1] == target.shape
        and output.shape[-1] > 1
    )
    return (x, output, target) if are_values or are_classes else None


def _draw_samples(samples: list[Sample], spec: Any) -> Figure:
    """One small picture a sample."""
    target = samples[0].target
    if target.is_floating_point():
        return _draw_values(samples)
    per_step = target.dim() == 1
    columns = 1 if per_step else min(8, len(samples))
    rows = -(-len(samples) // columns)
    size = (8, 0.7 * rows) if per_step else (1.25 * columns, 1.6 * rows)
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    for axes, sample in zip(figure.subplots(rows, columns, squeeze=False).flat, samples, strict=False):
        axes.set_xticks([])
        axes.set_yticks([])
        if per_step:
            both = torch.stack([sample.target, sample.answer])[:, sample.target != _LEFT_OUT]
            axes.imshow(both.numpy(), aspect="auto", interpolation="nearest", cmap="viridis")
            axes.set_yticks([0, 1], ["target", "answer"], fontsize=7)
            continue
        axes.imshow(_as_image(sample.x, spec).numpy(), cmap="gray", interpolation="nearest")
        answer, target = _class_name(sample.answer, spec), _class_name(sample.target, spec)
        text = f"{answer}, is {target}" if sample.is_wrong else answer
        axes.set_title(text, fontsize=8, color=_ORANGE if sample.is_wrong else _BLUE)
    for axes in figure.axes[len(samples) :]:
        axes.set_axis_off()
    return figure


def _draw_values(samples: list[Sample]) -> Figure:
    """Answers against targets, and the line on which they agree."""
    answers, targets = [float(one.answer) for one in samples], [float(one.target) for one in samples]
    figure = Figure(figsize=(4, 4), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.axline((targets[0], targets[0]), slope=1, color="0.7", linewidth=1)
    axes.scatter(targets, answers, s=18, color=_BLUE)
    axes.set(xlabel="target", ylabel="answer", aspect="equal")
    return figure


def _draw_confusion(counts: Tensor, spec: Any) -> Figure:
    """Counts (C, C)."""
    classes = len(counts)
    has_names = classes <= _MOST_NAMES
    figure = Figure(figsize=(0.6 * classes + 3,) * 2 if has_names else (8, 8), layout="constrained", dpi=120)
    labels = [_class_name(index, spec) for index in range(classes)]
    drawing: Any = MulticlassConfusionMatrix(classes)
    drawing.plot(counts, figure.subplots(), add_text=has_names, labels=labels, cmap="Blues")
    if not has_names:
        figure.axes[0].set(xticks=[], yticks=[])
    return figure


def _as_image(x: Tensor, spec: Any) -> Tensor:
    """An image `(C, H, W)`, a sequence `(T, F)` or numbers of any other shape as something that imshow takes."""
    if x.dim() not in (2, 3):
        return x.reshape(1, -1)
    if x.dim() == 2:
        side = int(x.numel() ** 0.5)
        return x.view(side, side) if x.shape[1] == 1 and side * side == x.numel() else x
    if getattr(spec, "mean", ()):
        x = x * torch.tensor(spec.std).view(-1, 1, 1) + torch.tensor(spec.mean).view(-1, 1, 1)
    return x.permute(1, 2, 0).clamp(0, 1) if x.shape[0] == 3 else x[0]


def _class_name(index: Any, spec: Any) -> str:
    names = getattr(spec, "classes", ())
    name = names[int(index)] if names else str(int(index))
    return name.split(" - ")[0]  # torchvision's MNIST calls its classes "7 - seven"
