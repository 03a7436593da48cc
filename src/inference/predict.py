"""Predictions of a trained network: a table with one row a sample, the raw outputs, and a picture of some samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from ..callbacks.prediction_images import Sample, draw_masks, draw_samples
from ..data.plain import has_test, lightning_of
from ..data.spec import CLASSES, LENGTHS, PADDING, DataSpec, arguments, takes
from ..errors import UserError, warn
from ..files import atomic_write, refuse_existing, writing
from ..training.trial import blamed
from .inputs import read_inputs
from .load import Trained, trainer_for

SPLITS = ("test", "val")
FORMATS = (".csv", ".npz")
_DRAWN = 32  # samples in the picture
_BATCH = 256  # samples of a batch, where the data do not say it


@dataclass(frozen=True)
class Predictions:
    """What a network answers to samples.

    `output` and `target` have the shapes that the DataSpec gives to its kind of target; `target` is None where nobody knows
    the answers. Behind the end of a sequence whose steps have a class each, `output` is NaN, and `answer` and `target` are
    PADDING. `drawn` holds the first samples. `not_finite` counts those with a NaN or an infinity in their output.
    """

    names: Sequence[str]
    output: Tensor
    target: Tensor | None
    drawn: Tensor
    spec: DataSpec
    note: str = ""
    not_finite: int = 0

    @property
    def answer(self) -> Tensor:
        """In the shape of the target: the class with the highest score, the labels whose logit is above 0, or numbers."""
        if self.spec.target in CLASSES:
            answer = self.output.argmax(dim=1 if self.spec.target == "class_per_pixel" else -1)
            return answer.masked_fill(self.output[..., 0].isnan(), PADDING) if self.spec.pads_steps else answer
        if self.spec.target == "multilabel":
            return (self.output > 0).long()
        return self.output.squeeze(-1) if self.spec.target == "value" else self.output

    @property
    def accuracy(self) -> float | None:
        """The fraction of samples whose class is right; None without targets or classes."""
        if self.target is None or self.spec.target != "class":
            return None
        return (self.answer == self.target).double().mean().item()

    def table(self) -> pd.DataFrame:
        """One row a sample: `sample`, `prediction`, `probability` of a class, and `target` where it is known.

        Each label and each number of a vector has a column: `prediction_cat`, or `prediction_0` where it has no name.
        """
        columns: dict[str, Any] = {"sample": list(self.names)} | self._columns("prediction", self.answer)
        if self.spec.target == "class":
            columns["probability"] = self.output.softmax(dim=-1).amax(dim=-1).tolist()
        return pd.DataFrame(columns | ({} if self.target is None else self._columns("target", self.target)))

    def class_name(self, index: int) -> str:
        """The name of a class, or its number."""
        names = self.spec.classes
        return names[index] if 0 <= index < len(names) else str(index)

    def draw(self) -> Figure:
        """A picture of the first images, with the class that each is taken for, and the true one where it is another; or masks."""
        answers = self.answer[: len(self.drawn)]
        targets = answers if self.target is None else self.target[: len(answers)]
        samples = [Sample(*each) for each in zip(self.drawn, answers, targets, strict=True)]
        return (draw_samples if self.spec.target == "class" else draw_masks)(samples, self.spec)

    def _columns(self, name: str, values: Tensor) -> dict[str, list]:
        match self.spec.target:
            case "class":
                return {name: [self.class_name(value) for value in values.tolist()]}
            case "class_per_step":
                rows = [[self.class_name(value) for value in row if value != PADDING] for row in values.tolist()]
                return {name: [*map(" ".join, rows)]}
            case "value":
                return {name: values.tolist()}
        kept = values.long() if self.spec.target == "multilabel" else values
        return {f"{name}_{self.class_name(i)}": kept[:, i].tolist() for i in range(kept.shape[1])}


def predict(trained: Trained, source: str) -> Predictions:
    """The answers of a network to a split of its data, or to a user's own files.

    Args:
        trained: the network.
        source: `test` or `val`, or what `read_inputs` takes.

    Raises:
        UserError: if the input cannot be read, the network does not take it, or the trainer's options leave no batch.
    """
    collected, spec = _Collected(trained.spec), trained.spec
    trainer = trainer_for(trained, collected.callback())
    if source in SPLITS:
        option, names, note = f"limit_{source}_batches", map(str, count()), ""
        trained.data.prepare_data()
        if trained.trained_on not in ("", trained.data.name):
            warn(f"the network was trained on {trained.trained_on}, and answers samples of {trained.data.name}")
        run = trainer.test if source == "test" else trainer.validate
        run(trained.module, datamodule=lightning_of(trained.data), verbose=False)
    else:
        inputs = read_inputs(Path(source), spec)
        option, names, note = "limit_predict_batches", inputs.names, inputs.resized
        loader = DataLoader(inputs, batch_size=min(trained.known.batch_size or _BATCH, len(inputs)))
        with blamed("input", f"{type(trained.network).__name__} does not take these samples"):
            trainer.predict(trained.module, dataloaders=loader, return_predictions=False)
    output = collected.output
    if not len(output):
        raise UserError(f"trainer.{option}: got {trained.config['trainer'].get(option)}, which predicts no batch")
    kept = (output, collected.target, collected.drawn, spec, note, collected.not_finite)
    return Predictions([*islice(names, len(output))], *kept)


class Samples(NamedTuple):
    """Inputs on the CPU as `DataSpec.parts` gives them, with the lengths that the network takes."""

    inputs: Any
    lengths: Tensor | None

    @property
    def named(self) -> dict[str, Tensor]:
        """Each input by its name; `x` for the one input of a network that gets it by position."""
        return arguments(self.inputs if isinstance(self.inputs, Mapping) else {"x": self.inputs}, self.lengths)[1]

    def __len__(self) -> int:
        return len(next(iter(self.named.values())))

    def repeated(self, size: int) -> "Samples":
        """So many samples, from the first on and again from the first on."""
        rows = torch.arange(size) % len(self)
        return Samples(*tree_map_only(Tensor, lambda tensor: tensor[rows], (self.inputs, self.lengths)))


def samples_of(trained: Trained, most: int) -> Samples:
    """The first test samples, of the first batch at most."""
    trained.data.prepare_data()
    data = lightning_of(trained.data)
    data.trainer = trainer_for(trained)  # which a `setup` may ask, as in Lightning
    if not has_test(trained.data):
        raise UserError(f"data: {trained.data.name} has no test set to take samples from")
    data.setup("test")
    batch = next(iter(data.test_dataloader()))
    x, _, lengths = trained.spec.parts(batch)
    found = (x, lengths if takes(trained.network, LENGTHS) else None)
    return Samples(*tree_map_only(Tensor, lambda tensor: tensor[:most].cpu(), found))


class _Collected:
    """Keeps what each batch of an evaluation returned as `output` and `target`, on the CPU."""

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._drawn: list[Tensor] = []
        self.not_finite = 0

    @property
    def output(self) -> Tensor:
        return _joined(self._outputs, math.nan) if self._outputs else torch.empty(0)

    @property
    def target(self) -> Tensor | None:
        return _joined(self._targets, PADDING) if self._targets else None

    @property
    def drawn(self) -> Tensor:
        return torch.cat(self._drawn) if self._drawn else torch.empty(0)

    def callback(self) -> LambdaCallback:
        """Keeps what each batch of a test, a validation or a prediction returns."""
        hooks = dict.fromkeys(("on_test_batch_end", "on_validation_batch_end", "on_predict_batch_end"), self._keep)
        return LambdaCallback(**hooks)

    def _keep(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *number: int) -> None:
        if not isinstance(outputs, dict) or not {"output", "input"} <= outputs.keys():
            raise UserError(
                f"model: the steps of {type(module).__name__} return no dict with `input` and `output` (and `target`, if "
                "known), which is what predict reads"
            )
        answer, target = outputs["output"], outputs.get("target")
        if not isinstance(answer, Tensor):
            raise UserError(f"predict: the network answers a {type(answer).__name__}, and a prediction is one tensor")
        output, target = answer.float().cpu(), None if target is None else target.cpu()
        odd = ~output.isfinite()
        if self._spec.pads_steps:
            lengths = batch[1] if len(batch) == 2 else self._spec.parts(batch)[2]  # of a user's files, of a split
            ended = torch.arange(output.shape[1]) >= lengths.cpu()[:, None]
            output, odd = output.masked_fill(ended[..., None], math.nan), odd & ~ended[..., None]
        self.not_finite += int(odd.flatten(1).any(1).sum() if odd.dim() > 1 else odd.sum())
        self._outputs.append(output)
        if target is not None:
            self._targets.append(target)
        missing = _DRAWN - sum(map(len, self._drawn))
        if missing > 0:
            self._drawn += [x[:missing].float().cpu() for x in tree_leaves(outputs["input"])[:1]]


def _joined(batches: list[Tensor], padding: float) -> Tensor:
    """Batches as one; of sequences of different lengths, each is padded to the longest."""
    if all(batch.shape[1:] == batches[0].shape[1:] for batch in batches):
        return torch.cat(batches)
    return pad_sequence([sample for batch in batches for sample in batch], True, padding)


def write_predictions(predictions: Predictions, path: Path) -> list[Path]:
    """Write predictions to `path`, and for images a picture of some beside it; the files that were written.

    A `.csv` file has the table; an `.npz` file has `output`, `prediction`, `target` where it is known, and `sample`.

    Raises:
        UserError: if the suffix is neither, or a file exists or cannot be written.
    """
    refuse_output(path, predictions.spec)
    with writing("output", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            if path.suffix == ".csv":
                file.write(
                    predictions.table().to_csv(index=False).encode("utf-8", "surrogateescape")
                )  # names of files may be any bytes
            else:
                arrays = {"output": predictions.output.numpy(), "prediction": predictions.answer.numpy()}
                arrays |= {} if predictions.target is None else {"target": predictions.target.numpy()}
                cast(Any, np).savez_compressed(file, sample=np.asarray(predictions.names), **arrays)
    if predictions.spec.kind != "image" or predictions.spec.target not in ("class", "class_per_pixel"):
        return [path]
    picture = path.with_suffix(".png")
    with writing("output", picture), atomic_write(picture) as file:
        predictions.draw().savefig(file, format="png")
    return [path, picture]


def refuse_output(path: Path, spec: DataSpec | None = None) -> None:
    """UserError unless predictions for such data can be written there; nothing that exists is replaced."""
    takes = FORMATS[1:] if spec is not None and spec.target in ("class_per_pixel", "input") else FORMATS
    if path.suffix not in takes:
        why = f": the target is {spec.target}" if spec is not None and takes != FORMATS else ""
        raise UserError(f"output: got '{path}', takes a name that ends in {' or '.join(takes)}{why}")
    for file in (path, path.with_suffix(".png")):
        refuse_existing("output", file)
