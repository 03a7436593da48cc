"""Predictions of a trained network: a table with one row a sample, the raw outputs, and a picture of some samples."""

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

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
from ..data.base import Split
from ..data.plain import lightning_of
from ..data.spec import CLASSES, LABELS, LENGTHS, PADDING, DataSpec, arguments
from ..errors import UserError, warn
from ..files import atomic_write, refuse_existing, writing
from ..training.task import Task
from ..training.trial import blamed
from .inputs import read_inputs
from .load import Trained, trainer_for
from .samples import SPLITS, inputs_of, serves

FORMATS = (".csv", ".npz")
_DRAWN = 32  # samples in the picture
_BATCH = 256  # samples of a batch, where the data do not say it


@dataclass(frozen=True)
class Predictions:
    """What a network answers to samples.

    `output` and `target` have the shapes that the DataSpec gives to its kind of target; `target` is None where nobody knows
    the answers. Behind the end of a sequence whose steps have a class each, `output` is NaN, and `answer` and `target` are
    PADDING. `drawn` holds the first images. `not_finite` counts those with a NaN or an infinity in their output.
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
            answer = self.spec.class_of(self.output)
            return answer.masked_fill(self.output[..., 0].isnan(), PADDING) if self.spec.pads_steps else answer
        if self.spec.target in LABELS:
            return (self.output > 0).long()
        return self.spec.without_n(self.output) if self.spec.target == "value" else self.output

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
            columns["probability"] = self._probability().tolist()
        return pd.DataFrame(columns | ({} if self.target is None else self._columns("target", self.target)))

    def arrays(self) -> dict[str, np.ndarray]:
        """`sample`, `output`, `prediction`, and `target` where it is known."""
        known = {"output": self.output, "prediction": self.answer}
        known |= {} if self.target is None else {"target": self.target}
        return {"sample": np.asarray(self.names)} | {name: tensor.numpy() for name, tensor in known.items()}

    @property
    def only_npz(self) -> str:
        """Why a table cannot hold them; empty where it can."""
        return only_npz(self.spec)

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

    def _probability(self) -> Tensor:
        """Of the class that each sample is taken for."""
        if not self.spec.is_one_logit:
            return self.output.softmax(dim=-1).amax(dim=-1)
        return self.spec.without_n(self.output).abs().sigmoid()

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


@dataclass(frozen=True)
class Answers:
    """What a `predict_step` of the user's own returns, or a network whose target is `any`: arrays with a row a sample.

    `columns` are by the keys of a dict; one tensor is `output`, and those of a tuple are `output_0` and so on.
    """

    names: Sequence[str]
    columns: Mapping[str, np.ndarray]
    note: str = ""
    accuracy: float | None = None  # nobody knows it

    @property
    def not_finite(self) -> int:
        """How many samples have a NaN or an infinity."""
        odd = np.zeros(len(self.names), bool)
        for array in (array for array in self.columns.values() if array.dtype.kind in "fc"):
            odd |= ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
        return int(odd.sum())

    def table(self) -> pd.DataFrame:
        """One row a sample: `sample`, and a column for each number of it."""
        columns: dict[str, Any] = {"sample": list(self.names)}
        for name, array in self.columns.items():
            columns |= {name: array} if array.ndim == 1 else {f"{name}_{i}": one for i, one in enumerate(array.T)}
        return pd.DataFrame(columns)

    def arrays(self) -> dict[str, np.ndarray]:
        """`sample`, and the arrays."""
        return {"sample": np.asarray(self.names), **self.columns}

    @property
    def only_npz(self) -> str:
        """Why a table cannot hold them; empty where it can."""
        shapes = (f"'{name}' has the shape {array.shape}" for name, array in self.columns.items() if array.ndim > 2)
        return next(shapes, "")


def has_own_shape(trained: Trained) -> bool:
    """Whether no DataSpec says what is answered: see Answers."""
    return not isinstance(trained.module, Task) or trained.spec.target == "any"


def predict(trained: Trained, source: str) -> Predictions | Answers:
    """The answers of a network to a split of its data, or to a user's own files.

    A LightningModule answers by its `predict_step`, also to the samples of a test or a validation. Without one its
    `forward` gets what `inputs_of` takes of a batch, as for an export.

    Args:
        trained: the network.
        source: `test`, `val` or `predict`, or what `read_inputs` takes.

    Raises:
        UserError: if the input cannot be read, the network does not take it, or the trainer's options leave no batch.
    """
    collected = _Rows() if has_own_shape(trained) else _Collected(trained.spec)
    trainer = trainer_for(trained, _at_each_batch(collected.keep))
    if not _has_step(trained.module):
        _give_step(trained, is_whole=source in ("test", "val"))
    names, note = map(str, count()), ""
    if source in SPLITS:
        stage = _predict_split(trained, source, trainer)
        samples = None if source == "predict" else trained.data.num_samples(cast(Split, source))
    else:
        inputs, stage = read_inputs(Path(source), trained.spec), "predict"
        names, note, samples = inputs.names, inputs.resized, len(inputs)
        loader = DataLoader(inputs, batch_size=min(trained.known.batch_size or _BATCH, len(inputs)))
        with blamed("input", _complaint(trained)):
            trainer.predict(trained.module, dataloaders=loader, return_predictions=False)
    option = f"limit_{'val' if stage == 'validate' else stage}_batches"
    limit = trained.config["trainer"].get(option)
    if not collected.rows:
        raise UserError(f"trainer.{option}: got {limit}, which predicts no batch")
    if samples is not None and collected.rows < samples:
        by = "" if limit is None else f", by trainer.{option}={limit}"
        note = f"{note}\n{collected.rows:,} of {samples:,} samples{by}".lstrip()
    return collected.found([*islice(names, collected.rows)], note)


def _predict_split(trained: Trained, source: str, trainer: Trainer) -> str:
    """Run the network on a split of its data; the stage of Lightning in which it ran."""
    data, (stage, method) = trained.data, SPLITS[source]
    module = lightning_of(data)
    data.prepare_data()
    if trained.trained_on not in ("", data.name):
        warn(f"the network was trained on {trained.trained_on}, and answers samples of {data.name}")
    module.trainer = trainer  # which a `setup` may ask, as in Lightning
    if not serves(data, source):
        missing = "test set" if source == "test" else method  # a DataModule has the method without a test set
        raise UserError(f"input: got '{source}', and {data.name} has no {missing}")
    if isinstance(trained.module, Task):
        how = {"return_predictions": False} if stage == "predict" else {"verbose": False}
        getattr(trainer, stage)(trained.module, datamodule=module, **how)
        return stage
    if stage != "predict":
        data.setup(stage)
        cast(Any, module).predict_dataloader = getattr(module, method)
    with blamed("input", _complaint(trained)):
        trainer.predict(trained.module, datamodule=module, return_predictions=False)
    return "predict"


def _complaint(trained: Trained) -> str:
    """What is wrong where a prediction fails."""
    name = type(trained.network).__name__
    if _has_step(trained.module):
        return f"{name} does not take these samples"
    return f"{name} has no predict_step(batch, batch_idx), and its forward does not take the inputs of a batch"


def _has_step(module: LightningModule) -> bool:
    return type(module).predict_step is not LightningModule.predict_step


def _give_step(trained: Trained, is_whole: bool) -> None:
    """Have a module without a `predict_step` answer to the inputs of a batch; Lightning would give `forward` all of it."""

    def step(batch: Any, *numbers: int) -> Any:
        args, named = arguments(*inputs_of(trained, batch, is_whole))
        return trained.network(*args, **named)

    cast(Any, trained.module).predict_step = step


def _at_each_batch(keep: Callable[..., None]) -> LambdaCallback:
    """Has the step of each batch of a test, a validation or a prediction kept."""
    hooks = ("on_test_batch_end", "on_validation_batch_end", "on_predict_batch_end")
    return LambdaCallback(**dict.fromkeys(hooks, keep))


class _Rows:
    """What each batch returned, on the CPU: arrays with a row a sample, by name."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: dict[str, list[np.ndarray]] = {}

    def keep(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *number: int) -> None:
        """Keep what the step of a batch returned."""
        outputs = outputs["output"] if isinstance(module, Task) else outputs
        named = {f"output_{i}": one for i, one in enumerate(outputs)} if isinstance(outputs, tuple) else outputs
        named = named if isinstance(named, Mapping) else {"output": named}
        arrays = {str(name): _array(value) for name, value in named.items()}
        lengths = {len(array) if array.ndim and array.dtype != object else None for array in arrays.values()}
        if len(lengths) != 1 or None in lengths or (self._parts and self._parts.keys() != arrays.keys()):
            shapes = {name: "an object" if array.dtype == object else array.shape for name, array in arrays.items()}
            raise UserError(
                f"model: {type(module).__name__} answers {shapes}, and predict takes a tensor with a row for each "
                "sample, or a dict or a tuple of them"
            )
        for name, array in arrays.items():
            self._parts.setdefault(name, []).append(array)
        self.rows += lengths.pop() or 0

    def found(self, names: Sequence[str], note: str) -> Answers:
        """What was kept, of samples with these names."""
        with blamed("model", "its answers to two batches have shapes that do not go together"):
            return Answers(names, {name: np.concatenate(parts) for name, parts in self._parts.items()}, note)


def _array(value: Any) -> np.ndarray:
    """A tensor, or a list of numbers, texts or tensors, as an array."""
    plain = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
    plain = plain.float() if isinstance(plain, Tensor) and plain.dtype == torch.bfloat16 else plain
    return np.asarray(plain)


class _Collected:
    """What each batch returned as `output` and `target`, on the CPU."""

    def __init__(self, spec: DataSpec) -> None:
        self.rows = 0
        self._spec = spec
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._drawn: list[Tensor] = []
        self._not_finite = 0

    def found(self, names: Sequence[str], note: str) -> Predictions:
        """What was kept, of samples with these names."""
        output, drawn = _joined(self._outputs, math.nan), torch.cat(self._drawn or [torch.empty(0)])
        target = _joined(self._targets, PADDING) if self._targets else None
        return Predictions(names, output, target, drawn, self._spec, note, self._not_finite)

    def keep(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *number: int) -> None:
        """Keep what the step of a batch returned."""
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
            ended = self._ended(batch, output.shape[1], target, trainer.predicting)
            output, odd = output.masked_fill(ended[..., None], math.nan), odd & ~ended[..., None]
        self._not_finite += int(odd.flatten(1).any(1).sum() if odd.dim() > 1 else odd.sum())
        self.rows += len(output)
        self._outputs.append(output)
        if target is not None:
            self._targets.append(target)
        missing = _DRAWN - sum(map(len, self._drawn))
        if self._spec.kind == "image" and missing > 0:
            self._drawn += [x[:missing].float().cpu() for x in tree_leaves(outputs["input"])[:1]]

    def _ended(self, batch: Any, steps: int, target: Tensor | None, is_predicted: bool) -> Tensor:
        """Which steps are behind the end of their sequence: `(B, steps)` bool. A batch of a split may have no lengths."""
        parts = batch if isinstance(batch, list | tuple | Mapping) else (batch,)
        if is_predicted and len(parts) == 2 and not isinstance(parts, Mapping):  # as Task.predict_step takes them
            lengths = parts[1]
        else:
            lengths = self._spec.named(parts).get(LENGTHS)
        if lengths is not None:
            return torch.arange(steps) >= lengths.cpu()[:, None]
        if target is None:
            raise UserError("input: the sequences vary in length, and a batch has no lengths; takes (inputs, lengths)")
        return target == PADDING


def _joined(batches: list[Tensor], padding: float) -> Tensor:
    """Batches as one; of sequences of different lengths, each is padded to the longest."""
    if all(batch.shape[1:] == batches[0].shape[1:] for batch in batches):
        return torch.cat(batches)
    return pad_sequence([sample for batch in batches for sample in batch], True, padding)


def write_predictions(predictions: Predictions | Answers, path: Path) -> list[Path]:
    """Write predictions to `path`, and for images a picture of some beside it; the files that were written.

    A `.csv` file has the table, an `.npz` file the arrays.

    Raises:
        UserError: if the suffix is neither, or a file exists or cannot be written.
    """
    refuse_output(path, predictions.only_npz)
    with writing("output", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            if path.suffix == ".csv":
                file.write(
                    predictions.table().to_csv(index=False).encode("utf-8", "surrogateescape")
                )  # names of files may be any bytes
            else:
                _write_arrays(predictions.arrays(), file)
    if not isinstance(predictions, Predictions) or predictions.spec.kind != "image":
        return [path]
    if predictions.spec.target not in ("class", "class_per_pixel"):
        return [path]
    picture = path.with_suffix(".png")
    with writing("output", picture), atomic_write(picture) as file:
        predictions.draw().savefig(file, format="png")
    return [path, picture]


def _write_arrays(arrays: Mapping[str, np.ndarray], file: Any) -> None:
    """As `np.savez_compressed`, which takes no array called `file`."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def only_npz(spec: DataSpec) -> str:
    """Why a table cannot hold predictions for such data; empty where it can."""
    numbers = ("class_per_pixel", "multilabel_per_pixel", "input")
    return f"the target is {spec.target}" if spec.target in numbers else ""


def refuse_output(path: Path, only_npz: str = "") -> None:
    """UserError unless predictions can be written there, as `.npz` where there is a reason; nothing is replaced."""
    takes = FORMATS[1:] if only_npz else FORMATS
    if path.suffix not in takes:
        why = f": {only_npz}" if only_npz else ""
        raise UserError(f"output: got '{path}', takes a name that ends in {' or '.join(takes)}{why}")
    for file in (path, path.with_suffix(".png")):
        refuse_existing("output", file)
