"""Predictions of a trained network: a table with one row a sample, the raw outputs, and a picture of some samples."""

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader

from ..callbacks.prediction_images import Sample, draw_masks, draw_samples
from ..data.base import Split
from ..data.plain import lightning_of
from ..data.spec import CLASSES, LABELS, PADDING, DataSpec, arguments
from ..errors import UserError, warn
from ..files import atomic_write, refuse_existing, writing
from ..training.task import Task
from ..training.trial import blamed
from .inputs import read_inputs
from .load import Trained, trainer_for
from .samples import SPLITS, inputs_of, parts_of, serves

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
    """The answers of a network to a split of its data, or to a user's own files, by Lightning's `Trainer.predict`.

    A LightningModule answers by its `predict_step`, also to the samples of a test or a validation. Without one its
    `forward` gets what `inputs_of` takes of a batch, as for an export. A Task's `predict_step` gets the inputs alone.

    Args:
        trained: the network.
        source: `test`, `val` or `predict`, or what `read_inputs` takes.

    Raises:
        UserError: if the input cannot be read, the network does not take it, or the trainer's options leave no batch.
    """
    stage = SPLITS[source][0] if source in SPLITS else "predict"
    option = f"limit_{'val' if stage == 'validate' else stage}_batches"
    trainer = trainer_for(trained)
    trainer.limit_predict_batches = getattr(trainer, option)
    _set_step(trained, is_whole=source in ("test", "val"))
    names, note, samples = map(str, count()), "", None
    if source in SPLITS:
        served: dict[str, Any] = {"datamodule": _serving(trained, source, trainer)}
        samples = None if source == "predict" else trained.data.num_samples(cast(Split, source))
    else:
        inputs = read_inputs(Path(source), trained.spec)
        names, note, samples = inputs.names, inputs.resized, len(inputs)
        served = {"dataloaders": DataLoader(inputs, batch_size=min(trained.known.batch_size or _BATCH, len(inputs)))}
    with blamed("input", _complaint(trained)):
        found: Any = trainer.predict(trained.module, **served) or []
    batches = [*chain(*found)] if found and trainer.predict_loop.num_dataloaders > 1 else [*found]
    found.clear()  # Lightning's own list, which lives as long as the module's trainer
    limit = trained.config["trainer"].get(option)
    if not batches:
        raise UserError(f"trainer.{option}: got {limit}, which predicts no batch")
    is_own = has_own_shape(trained)
    kept: dict[str, Any] = _columns(batches, type(trained.module).__name__) if is_own else _joined(batches)
    rows = len(next(iter(kept.values())))
    if samples is not None and rows < samples:
        by = "" if limit is None else f", by trainer.{option}={limit}"
        note = f"{note}\n{rows:,} of {samples:,} samples{by}".lstrip()
    first = [*islice(names, rows)]
    return Answers(first, kept, note) if is_own else Predictions(first, spec=trained.spec, note=note, **kept)


def _serving(trained: Trained, source: str, trainer: Trainer) -> LightningDataModule:
    """The data, whose `predict_dataloader` serves a split from now on."""
    data, (stage, method) = trained.data, SPLITS[source]
    module: Any = lightning_of(data)
    data.prepare_data()
    if trained.trained_on not in ("", data.name):
        warn(f"the network was trained on {trained.trained_on}, and answers samples of {data.name}")
    module.trainer = trainer  # which a `setup` may ask, as in Lightning
    if not serves(data, source):
        missing = "test set" if source == "test" else method  # a DataModule has the method without a test set
        raise UserError(f"input: got '{source}', and {data.name} has no {missing}")
    if source != "predict":
        data.setup(stage)
        serve, setup = getattr(module, method), module.setup
        module.predict_dataloader = lambda: tree_map_only(DataLoader, _remade, serve())
        module.setup = lambda stage: None if stage == "predict" else setup(stage)  # that split is set up
    return module


class _AsItIs:
    """A loader that Lightning does not make anew."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def _remade(loader: DataLoader) -> Any:
    """A loader that Lightning makes anew for a prediction, without `drop_last`, unless its batch sampler is no torch's."""
    return loader if type(loader.batch_sampler) is BatchSampler else _AsItIs(loader)


def _complaint(trained: Trained) -> str:
    """What is wrong where a prediction fails."""
    name = type(trained.network).__name__
    if isinstance(trained.module, Task) or _has_step(trained.module):
        return f"{name} does not take these samples"
    return f"{name} has no predict_step(batch, batch_idx), and its forward does not take the inputs of a batch"


def _has_step(module: LightningModule) -> bool:
    return type(module).predict_step is not LightningModule.predict_step


def _set_step(trained: Trained, is_whole: bool) -> None:
    """Have a Task, and a module without a `predict_step`, answer to a batch, which has a target if it `is_whole`."""
    module: Any = trained.module
    step, missing = type(module).predict_step, _DRAWN  # a subclass of Task may have a step of its own

    def answer(batch: Any, batch_idx: int, *number: int) -> Any:
        args, named = arguments(*inputs_of(trained, batch, is_whole))
        return trained.network(*args, **named)

    def answer_of_task(batch: Any, batch_idx: int, *number: int) -> Any:
        nonlocal missing
        x, target, lengths = parts_of(trained.spec, batch, is_whole)
        target = target.clone() if isinstance(target, Tensor) else target  # a worker's tensor would hold a file open
        output = step(module, (x,) if lengths is None else (x, lengths), batch_idx)
        output = output.get("output") if isinstance(output, Mapping) else output
        if trained.spec.target == "any":
            return output
        if not isinstance(output, Tensor):
            raise UserError(f"predict: the network answers a {type(output).__name__}, and a prediction is one tensor")
        output, drawn = output.float(), torch.empty(0)
        odd = ~output.isfinite()
        if trained.spec.pads_steps:
            ended = _ended(output.shape[1], target, lengths)[..., None]
            output, odd = output.masked_fill(ended, math.nan), odd & ~ended
        if trained.spec.kind == "image":
            drawn = tree_leaves(x)[0][:missing].float().clone()  # a view would hold all images
            missing -= len(drawn)
        odd = odd.flatten(1).any(1) if odd.dim() > 1 else odd
        return {"output": output, "target": target, "drawn": drawn, "odd": odd}

    if isinstance(module, Task):
        module.predict_step = answer_of_task
    elif not _has_step(module):
        module.predict_step = answer


def _ended(steps: int, target: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Which steps are behind the end of their sequence: `(B, steps)` bool. A batch of a split may have no lengths."""
    if lengths is not None:
        return torch.arange(steps, device=lengths.device) >= lengths[:, None]
    if target is None:
        raise UserError("input: the sequences vary in length, and a batch has no lengths; takes (inputs, lengths)")
    return target == PADDING


def _joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """A Task's answers to all batches, by the fields of Predictions."""
    parts = {name: [batch[name] for batch in batches] for name in batches[0]}
    target = None if parts["target"][0] is None else _padded(parts["target"], PADDING)
    drawn, not_finite = torch.cat(parts["drawn"]), int(torch.cat(parts["odd"]).sum())
    return {"output": _padded(parts["output"], math.nan), "target": target, "drawn": drawn, "not_finite": not_finite}


def _padded(batches: list[Tensor], padding: float) -> Tensor:
    """Batches as one; of sequences of different lengths, each is padded to the longest."""
    if all(batch.shape[1:] == batches[0].shape[1:] for batch in batches):
        return torch.cat(batches)
    return pad_sequence([sample for batch in batches for sample in batch], True, padding)


def _columns(batches: list[Any], name: str) -> dict[str, np.ndarray]:
    """What the step of a module of this name returned for all batches: arrays with a row a sample, by name."""
    parts: dict[str, list[np.ndarray]] = {}
    for answer in batches:
        answer = {f"output_{i}": part for i, part in enumerate(answer)} if isinstance(answer, tuple) else answer
        named = answer if isinstance(answer, Mapping) else {"output": answer}
        arrays = {str(key): _array(value) for key, value in named.items()}
        lengths = {len(array) if array.ndim and array.dtype != object else None for array in arrays.values()}
        if len(lengths) != 1 or None in lengths or (parts and parts.keys() != arrays.keys()):
            shapes = {key: "an object" if array.dtype == object else array.shape for key, array in arrays.items()}
            raise UserError(
                f"model: {name} answers {shapes}, and predict takes a tensor with a row for each sample, or a dict or "
                "a tuple of them"
            )
        for key, array in arrays.items():
            parts.setdefault(key, []).append(array)
    with blamed("model", "its answers to two batches have shapes that do not go together"):
        return {key: np.concatenate(arrays) for key, arrays in parts.items()}


def _array(value: Any) -> np.ndarray:
    """A tensor, or a list of numbers, texts or tensors, as an array."""
    plain = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
    plain = plain.float() if isinstance(plain, Tensor) and plain.dtype == torch.bfloat16 else plain
    return np.asarray(plain)


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
