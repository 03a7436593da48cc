"""PredictionImages: some test samples with the model's predictions, and the confusion matrix, as TensorBoard images."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from ..options.types import PositiveInt
from ._never_raise import never_raise

_LEFT_OUT = -100
_BLUE, _ORANGE = "#0072B2", "#D55E00"  # told apart by everybody (Okabe & Ito 2008)


class PredictionImages(Callback):
    """Draws what `test_step` returned as `output` and `target`; does nothing for steps that return neither.

    The input is what it returned as `input`, or the first part of the batch. Steps with a target of -100, which torch's
    losses leave out, are not drawn.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `test/samples` | image | samples with target and prediction, mistakes first |
    | `test/confusion` | image | rows are the true classes, columns the predicted ones |

    A module may have a `spec` with `classes`, `mean` and `std`, for names and true colours.

    Args:
        num_samples: how many samples are drawn.
    """

    observes_only = True

    def __init__(self, num_samples: PositiveInt = 16):
        self.num_samples = num_samples
        self._samples: list[tuple[bool, Tensor, Tensor, Tensor]] = []  # whether wrong, input, answer, target
        self._confusion: Tensor | None = None
        self._active = False

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._samples, self._confusion, self._active = [], None, True

    def disable(self) -> None:
        """Draw nothing in this test."""
        self._samples, self._active = [], False

    @override
    @never_raise
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *indices: int
    ) -> None:
        if not self._active or not isinstance(outputs, dict) or not {"output", "target"} <= outputs.keys():
            return
        x = outputs["input"] if "input" in outputs else batch[0]
        output, target = outputs["output"], outputs["target"]
        if output.dim() == 2 and target.dim() == 1 and not target.is_floating_point():
            answer = output.argmax(dim=-1)
            wrong = answer != target
            cells = torch.bincount(target * output.shape[1] + answer, minlength=output.shape[1] ** 2)
            self._confusion = cells if self._confusion is None else self._confusion + cells
        else:
            answer = output.argmax(dim=-1) if output.dim() == 3 else output.squeeze(-1)
            wrong = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        if sum(mistake for mistake, *_ in self._samples) < self.num_samples:
            for i in wrong.int().argsort(descending=True, stable=True)[: self.num_samples].tolist():
                self._samples.append((bool(wrong[i]), x[i].cpu(), answer[i].cpu(), target[i].cpu()))
            self._samples = sorted(self._samples, key=lambda s: not s[0])[: self.num_samples]

    @override
    @never_raise
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        online = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        if not self._samples or not (writers or online) or not trainer.is_global_zero:
            return
        spec = getattr(pl_module, "spec", None)
        figures = {"test/samples": _draw_samples([s[1:] for s in self._samples], spec)}
        if self._confusion is not None:
            classes = int(len(self._confusion) ** 0.5)
            figures["test/confusion"] = _draw_confusion(self._confusion.view(classes, classes).cpu(), spec)
        for key, figure in figures.items():
            for logger in online:
                logger.log_image(key, [figure])
            for writer in writers:
                writer.add_figure(key, figure, trainer.global_step, close=False)


def _draw_samples(samples: list[tuple[Tensor, Tensor, Tensor]], spec: Any) -> Figure:
    """One small picture a sample: `(x, answer, target)`."""
    target = samples[0][2]
    if target.is_floating_point():
        return _draw_values(samples)
    per_step = target.dim() == 1
    columns = 1 if per_step else min(8, len(samples))
    rows = -(-len(samples) // columns)
    figure = Figure(
        figsize=(8, 0.7 * rows) if per_step else (1.25 * columns, 1.6 * rows), layout="constrained", dpi=120
    )
    for axes, (x, answer, target) in zip(figure.subplots(rows, columns, squeeze=False).flat, samples, strict=False):
        axes.set_xticks([])
        axes.set_yticks([])
        if per_step:
            is_step = target != _LEFT_OUT
            axes.imshow(
                torch.stack([target[is_step], answer[is_step]]).numpy(),
                aspect="auto",
                interpolation="nearest",
                cmap="viridis",
            )
            axes.set_yticks([0, 1], ["target", "answer"], fontsize=7)
            continue
        axes.imshow(_as_image(x, spec).numpy(), cmap="gray", interpolation="nearest")
        right = bool(answer == target)
        text = _class_name(answer, spec) if right else f"{_class_name(answer, spec)}, is {_class_name(target, spec)}"
        axes.set_title(text, fontsize=8, color=_BLUE if right else _ORANGE)
    for axes in figure.axes[len(samples) :]:
        axes.set_axis_off()
    return figure


def _draw_values(samples: list[tuple[Tensor, Tensor, Tensor]]) -> Figure:
    """Answers against targets, and the line on which they agree."""
    answers, targets = [float(s[1]) for s in samples], [float(s[2]) for s in samples]
    figure = Figure(figsize=(4, 4), layout="constrained", dpi=120)
    axes = figure.subplots()
    low, high = min(answers + targets), max(answers + targets)
    axes.plot([low, high], [low, high], color="0.7", linewidth=1)
    axes.scatter(targets, answers, s=18, color=_BLUE)
    axes.set_xlabel("target")
    axes.set_ylabel("answer")
    axes.set_aspect("equal")
    return figure


def _draw_confusion(counts: Tensor, spec: Any) -> Figure:
    """Counts `(C, C)`; the colour is the share of a row, so that rare mistakes can be seen."""
    classes = len(counts)
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    off_diagonal = share.clone().fill_diagonal_(0)
    figure = Figure(figsize=(6, 5.6), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.imshow(off_diagonal.numpy(), cmap="Oranges", vmin=0, vmax=max(0.02, float(off_diagonal.max())))
    if classes <= 20:
        names = [_class_name(i, spec) for i in range(classes)]
        axes.set_xticks(range(classes), names, rotation=45 if max(map(len, names)) > 3 else 0, fontsize=8)
        axes.set_yticks(range(classes), names, fontsize=8)
        for i, j in torch.cartesian_prod(torch.arange(classes), torch.arange(classes)).tolist():
            if counts[i, j]:
                weight, color = ("bold", _BLUE) if i == j else ("normal", "black")
                text = str(int(counts[i, j]))
                axes.text(j, i, text, ha="center", va="center", fontsize=7, weight=weight, color=color)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(f"{int(counts.trace()):,} of {int(counts.sum()):,} right; mistakes are coloured", fontsize=9)
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
