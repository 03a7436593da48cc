"""Predictions of a trained network: a table with one row a sample, or the raw outputs."""

import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from .._lightning import by_keyword
from ..data.base import DataModule, Split
from ..data.plain import lightning_of
from ..data.spec import CLASSES, LABELS, PADDING, DataSpec, arguments
from ..errors import UserError, in_one_line, warn
from ..files import refuse_existing
from ..records.read import replacing
from ..training.task import Task
from ..training.trial import blamed
from .inputs import read_inputs
from .load import Trained, trainer_for
from .samples import SPLITS, inputs_of, parts_of, serves, stage_of

FORMATS = (".csv", ".npz")
_NO_TABLE = ("class_per_pixel", "multilabel_per_pixel", "input")  # targets that a row of a table does not hold
_BUILDS_LOADERS = "lightning.pytorch.utilities.data"  # the module
_BATCH = 256  # samples of a batch, where the data do not say it


@dataclass(frozen=True)
class Predictions:
    """What a network answers to samples: arrays with a row a sample, by name.

    With a DataSpec they are `output` and `prediction` in the shapes that it gives to its kind of target, `probability` of a
    class, and `target` where it is known. Behind the end of a sequence whose steps have a class each, `output` is NaN, and
    the others are PADDING. Without one, they are what a `predict_step` of the user's own returns, or a network whose target
    is `any`: by the keys of a dict; one tensor is `output`, and those of a tuple are `output_0` and so on.
    """

    names: Sequence[str]
    arrays: Mapping[str, np.ndarray]
    spec: DataSpec | None = None
    note: str = ""

    @property
    def accuracy(self) -> float | None:
        """The fraction of samples whose class is right; None without targets or classes."""
        if self.spec is None or self.spec.target != "class" or "target" not in self.arrays:
            return None
        return float((self.arrays["prediction"] == self.arrays["target"]).mean())

    def table(self) -> pd.DataFrame:
        """One row a sample: `sample`, and a column for each number of it; with a DataSpec without the outputs.

        Classes have their names. Labels and the numbers of a vector are named in the heading: `prediction_cat`, or
        `prediction_0` where they have no names. UserError for arrays of more than two dimensions.
        """
        columns: dict[str, Any] = {"sample": list(self.names)}
        for name, array in self.arrays.items():
            if name != "output" or self.spec is None:
                columns |= self._columns(name, array)
        return pd.DataFrame(columns)

    def _columns(self, name: str, array: np.ndarray) -> dict[str, Any]:
        if name in ("prediction", "target") and self.spec is not None:
            if self.spec.target == "class":
                return {name: [self._class_name(value) for value in array.tolist()]}
            if self.spec.target == "class_per_step":
                return {name: [*map(self._steps, array.tolist())]}
        if array.ndim > 2:
            raise UserError(f"output: takes an .npz file: '{name}' has the shape {array.shape}")
        return {name: array} if array.ndim == 1 else {f"{name}_{self._class_name(i)}": v for i, v in enumerate(array.T)}

    def _steps(self, row: list[int]) -> str:
        """The classes of a sequence; a step without a class is `-`, and none is written behind the last one."""
        end = max((number + 1 for number, value in enumerate(row) if value != PADDING), default=0)
        return " ".join("-" if value == PADDING else self._class_name(value) for value in row[:end])

    def _class_name(self, index: int) -> str:
        """The name of a class, or its number."""
        names = self.spec.classes if self.spec is not None else ()
        return names[index] if 0 <= index < len(names) else str(index)


def has_own_shape(trained: Trained) -> bool:
    """Whether no DataSpec says what is answered."""
    return not isinstance(trained.module, Task) or trained.spec.target == "any"


def predict(trained: Trained, source: str) -> Predictions:
    """The answers of a network to a split of its data, or to a user's own files, by Lightning's `Trainer.predict`.

    A LightningModule answers by its `predict_step`, also to the samples of a test or a validation. Without one its
    `forward` gets what `inputs_of` takes of a batch, as for an export, or the whole of a dict of which it names nothing. A
    Task's `predict_step` gets the inputs alone.

    Args:
        trained: the network.
        source: `test`, `val` or `predict`, or what `read_inputs` takes.

    Raises:
        UserError: if the input cannot be read, the network does not take it, or the trainer's options leave no batch.
    """
    option = f"limit_{source if source in SPLITS else 'predict'}_batches"
    trainer = trainer_for(trained)
    trainer.limit_predict_batches = getattr(trainer, option)
    _set_step(trained, is_whole=source in ("test", "val"))
    names: Iterable[str] = map(str, count())
    note, samples = "", None
    if source in SPLITS:
        served: dict[str, Any] = {"datamodule": _serving(trained, source, trainer)}
        samples = None if source == "predict" else trained.data.num_samples(cast(Split, source))
    else:
        names, inputs = read_inputs(Path(source), trained.spec, trained.dtype)
        samples = len(names)
        served = {"dataloaders": DataLoader(inputs, batch_size=min(trained.known.batch_size or _BATCH, samples))}
    with blamed("input", _complaint(trained)):
        try:
            found: Any = trainer.predict(trained.module, **served) or []
        except Exception as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            if any(frame.f_globals.get("__name__") == _BUILDS_LOADERS for frame in frames):
                said = f"Lightning cannot build the DataLoader of '{source}' anew, as it does for a prediction"
                raise UserError(f"input: {said}: {in_one_line(error)}") from error
            raise
    batches = [*chain(*found)] if found and trainer.predict_loop.num_dataloaders > 1 else [*found]
    found.clear()  # Lightning's own list, which lives as long as the module's trainer
    limit = trained.config["trainer"].get(option)
    if not batches:
        raise UserError(f"trainer.{option}: got {limit}, which predicts no batch")
    is_own = has_own_shape(trained)
    arrays = _columns(batches, type(trained.module).__name__) if is_own else arrays_of(trained.spec, *_joined(batches))
    rows = len(next(iter(arrays.values())))
    if samples is not None and rows < samples:
        note = f"{rows:,} of {samples:,} samples" + (f", by trainer.{option}={limit}" if limit is not None else "")
    return Predictions([*islice(names, rows)], arrays, None if is_own else trained.spec, note)


def arrays_of(spec: DataSpec, output: Tensor, target: Tensor | None) -> dict[str, np.ndarray]:
    """The arrays of Predictions, from all outputs and targets of the shapes that a DataSpec gives them."""
    found = {"output": output, "prediction": output}
    if spec.target in CLASSES:
        answer = spec.class_of(output)
        found["prediction"] = answer.masked_fill(output[..., 0].isnan(), PADDING) if spec.pads_steps else answer
    elif spec.target in LABELS:
        found["prediction"] = (output > 0).long()
    elif spec.target == "value":
        found["prediction"] = spec.without_n(output)
    if spec.target == "class":
        scores = spec.without_n(output).abs().sigmoid() if spec.is_one_logit else output.softmax(-1).amax(-1)
        found["probability"] = scores
    if target is not None:
        found["target"] = (
            target.long() if spec.target in (*CLASSES, *LABELS) else target.float()
        )  # numpy has no bfloat16
    return {name: tensor.numpy() for name, tensor in found.items()}


def _serving(trained: Trained, source: str, trainer: Trainer) -> LightningDataModule:
    """The data, whose `predict_dataloader` serves a split from now on."""
    data, method = trained.data, f"{source}_dataloader"
    module: Any = lightning_of(data)
    data.prepare_data()
    if trained.trained_on not in ("", data.name):
        warn(f"the network was trained on {trained.trained_on}, and answers samples of {data.name}")
    module.trainer = trainer  # which a `setup` may ask, as in Lightning
    if not serves(data, source):
        missing = "test set" if source == "test" else method  # a DataModule has the method without a test set
        raise UserError(f"input: got '{source}', and {data.name} has no {missing}")
    module.predict_dataloader = partial(by_keyword, getattr(module, method))
    if source != "predict":
        data.setup(stage_of(data, source))
        if not isinstance(data, DataModule):  # whose `setup` does nothing for this stage
            setup = module.setup
            module.setup = lambda stage: None if stage == "predict" else setup(stage)  # that split is set up
    return module


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
    step = type(module).predict_step  # a subclass of Task may have a step of its own

    def answer(batch: Any, batch_idx: int, *number: int) -> Any:
        inputs, lengths = inputs_of(trained, batch, is_whole)
        if isinstance(inputs, Mapping) and not inputs:  # `forward` names nothing of it: as in Lightning's own step
            return trained.network(batch)
        args, named = arguments(inputs, lengths)
        return trained.network(*args, **named)

    def answer_of_task(batch: Any, batch_idx: int, *number: int) -> Any:
        x, target, lengths = parts_of(trained.spec, batch, is_whole)
        target = target.clone() if isinstance(target, Tensor) else target  # a worker's tensor would hold a file open
        output = step(module, (x,) if lengths is None else (x, lengths), batch_idx)
        output = output.get("output") if isinstance(output, Mapping) else output
        if trained.spec.target == "any":
            return output
        if not isinstance(output, Tensor):
            raise UserError(f"predict: the network answers a {type(output).__name__}, and a prediction is one tensor")
        output = output.float()
        if trained.spec.pads_steps:
            output = output.masked_fill(_ended(output.shape[1], target, lengths)[..., None], math.nan)
        return {"output": output, "target": target}

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


def _joined(batches: list[dict[str, Any]]) -> tuple[Tensor, Tensor | None]:
    """A Task's outputs and targets of all batches."""
    outputs, targets = ([batch[name] for batch in batches] for name in ("output", "target"))
    return _padded(outputs, math.nan), None if targets[0] is None else _padded(targets, PADDING)


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
    """A tensor, or a list of numbers, texts or tensors, as an array; one of no shape, where their lengths differ."""
    plain = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
    plain = plain.float() if isinstance(plain, Tensor) and plain.dtype == torch.bfloat16 else plain
    try:
        return np.asarray(plain)
    except ValueError:
        return np.asarray(None)


def write_predictions(predictions: Predictions, path: Path) -> None:
    """Write the table to a `.csv` file, or the arrays and `sample`, their names, to an `.npz` file.

    Raises:
        UserError: if the file cannot be written, or a table cannot hold the arrays.
    """
    if "sample" in predictions.arrays:
        raise UserError("model: it answers an array called 'sample', which is what the names of the samples are called")
    table = predictions.table().to_csv(index=False) if path.suffix == ".csv" else ""
    if not table and "file" in predictions.arrays:
        raise UserError("model: it answers an array called 'file', which numpy writes to no .npz file")
    with replacing(path, "output") as file:
        if table:
            file.write(table.encode("utf-8", "surrogateescape"))  # names of files may be any bytes
        else:
            arrays: dict[str, Any] = {"sample": np.asarray(predictions.names), **predictions.arrays}
            np.savez_compressed(file, **arrays)


def refuse_output(path: Path, trained: Trained) -> None:
    """UserError unless predictions of a network can be written there; nothing is replaced."""
    refuse_existing("output", path)
    is_npz = not has_own_shape(trained) and trained.spec.target in _NO_TABLE
    if path.suffix not in (takes := FORMATS[1:] if is_npz else FORMATS):
        why = f": the target is {trained.spec.target}" if is_npz else ""
        raise UserError(f"output: got '{path}', takes a name that ends in {' or '.join(takes)}{why}")
