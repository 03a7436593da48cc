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

from .._lightning import pass_by_keyword
from ..data.base import DataModule, Split
from ..data.plain import lightning_datamodule
from ..data.spec import CLASSES, LABELS, PADDING, DataSpec, forward_arguments
from ..errors import UserError, in_one_line, warn
from ..files import refuse_existing
from ..records.read import replacing
from ..training.task import Task
from ..training.trial import blamed
from .inputs import read_inputs
from .load import Trained, trainer_for
from .samples import SPLITS, batch_inputs, has_split, setup_stage, split_batch

FORMATS = (".csv", ".npz")
_NO_TABLE = ("class_per_pixel", "multilabel_per_pixel", "input")  # targets that do not fit into a row of a table
_LOADER_MODULE = "lightning.pytorch.utilities.data"  # rebuilds a DataLoader for a prediction
_DEFAULT_BATCH_SIZE = 256


@dataclass(frozen=True)
class Predictions:
    """The outputs of a network for samples: arrays with a row a sample, by name.

    With a DataSpec they are `output` and `prediction` in the shapes of its target, `probability` of a class, and
    `target` if it is known. Behind the end of a sequence with a class for each step, `output` is NaN, and the others
    are PADDING. Without one, or if the target is `any`, they are what the user's `predict_step` or the network returns:
    a dict by its keys, one tensor as `output`, a tuple as `output_0`, `output_1`, …
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
        """Return a row for each sample, with `sample` and a column for each number; with a DataSpec without `output`.

        Classes are written by name. Labels and the numbers of a vector are named in the heading: `prediction_cat`, or
        `prediction_0` if they have no names. UserError for arrays of more than two dimensions.
        """
        columns: dict[str, Any] = {"sample": list(self.names)}
        for name, array in self.arrays.items():
            if name != "output" or self.spec is None:
                columns |= self._array_columns(name, array)
        return pd.DataFrame(columns)

    def _array_columns(self, name: str, array: np.ndarray) -> dict[str, Any]:
        if name in ("prediction", "target") and self.spec is not None:
            if self.spec.target == "class":
                return {name: [self._class_name(value) for value in array.tolist()]}
            if self.spec.target == "class_per_step":
                return {name: [*map(self._step_classes, array.tolist())]}
        if array.ndim > 2:
            raise UserError(f"output: takes an .npz file: '{name}' has the shape {array.shape}")
        return {name: array} if array.ndim == 1 else {f"{name}_{self._class_name(i)}": v for i, v in enumerate(array.T)}

    def _step_classes(self, row: list[int]) -> str:
        """Return the classes of a sequence up to its last step with a class; `-` for a step without one."""
        end = max((step + 1 for step, value in enumerate(row) if value != PADDING), default=0)
        return " ".join("-" if value == PADDING else self._class_name(value) for value in row[:end])

    def _class_name(self, index: int) -> str:
        """Return the name of a class, or its number if it has no name."""
        names = self.spec.classes if self.spec is not None else ()
        return names[index] if 0 <= index < len(names) else str(index)


def has_custom_output(trained: Trained) -> bool:
    """Whether no DataSpec describes the output."""
    return not isinstance(trained.module, Task) or trained.spec.target == "any"


def predict(trained: Trained, source: str) -> Predictions:
    """Return a network's predictions for a split of its data, or for a user's files, by Lightning's `Trainer.predict`.

    A LightningModule predicts by its `predict_step`, test and validation samples, too. Without a `predict_step`, its
    `forward` gets the result of `batch_inputs`, as in an export, or the whole dict if it names none of the dict's
    fields. A Task's `predict_step` gets only the inputs.

    Args:
        trained: the network.
        source: `test`, `val`, `predict`, or a file or folder for `read_inputs`.

    Raises:
        UserError: if the input cannot be read, the network does not take it, or the trainer's limits leave no batch.
    """
    option = f"limit_{source if source in SPLITS else 'predict'}_batches"
    trainer = trainer_for(trained)
    trainer.limit_predict_batches = getattr(trainer, option)
    _set_predict_step(trained, has_target=source in ("test", "val"))
    names: Iterable[str] = map(str, count())
    note, samples = "", None
    if source in SPLITS:
        data: dict[str, Any] = {"datamodule": _serve_split(trained, source, trainer)}
        samples = None if source == "predict" else trained.data.num_samples(cast(Split, source))
    else:
        names, inputs = read_inputs(Path(source), trained.spec, trained.dtype)
        samples = len(names)
        batch_size = min(trained.data_info.batch_size or _DEFAULT_BATCH_SIZE, samples)
        data = {"dataloaders": DataLoader(inputs, batch_size=batch_size)}
    with blamed("input", _failure_message(trained)):
        try:
            outputs: Any = trainer.predict(trained.module, **data) or []
        except Exception as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            if any(frame.f_globals.get("__name__") == _LOADER_MODULE for frame in frames):
                problem = f"Lightning cannot build the DataLoader of '{source}' anew, as it does for a prediction"
                raise UserError(f"input: {problem}: {in_one_line(error)}") from error
            raise
    batches = [*chain(*outputs)] if outputs and trainer.predict_loop.num_dataloaders > 1 else [*outputs]
    outputs.clear()  # Lightning's list, which lives as long as the module's trainer
    limit = trained.config["trainer"].get(option)
    if not batches:
        raise UserError(f"trainer.{option}: got {limit}, which predicts no batch")
    if has_custom_output(trained):
        spec, arrays = None, _join_arrays(batches, type(trained.module).__name__)
    else:
        spec, arrays = trained.spec, prediction_arrays(trained.spec, *_join_batches(batches))
    rows = len(next(iter(arrays.values())))
    if samples is not None and rows < samples:
        note = f"{rows:,} of {samples:,} samples" + (f", by trainer.{option}={limit}" if limit is not None else "")
    return Predictions([*islice(names, rows)], arrays, spec, note)


def prediction_arrays(spec: DataSpec, output: Tensor, target: Tensor | None) -> dict[str, np.ndarray]:
    """Return the arrays of Predictions for all outputs and targets, which have the shapes of the DataSpec."""
    tensors = {"output": output, "prediction": output}
    if spec.target in CLASSES:
        classes = spec.class_of(output)
        tensors["prediction"] = classes.masked_fill(output[..., 0].isnan(), PADDING) if spec.pads_steps else classes
    elif spec.target in LABELS:
        tensors["prediction"] = (output > 0).long()
    elif spec.target == "value":
        tensors["prediction"] = spec.without_n(output)
    if spec.target == "class":
        probability = spec.without_n(output).abs().sigmoid() if spec.is_one_logit else output.softmax(-1).amax(-1)
        tensors["probability"] = probability
    if target is not None:  # numpy has no bfloat16
        tensors["target"] = target.long() if spec.target in (*CLASSES, *LABELS) else target.float()
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _serve_split(trained: Trained, source: str, trainer: Trainer) -> LightningDataModule:
    """Make the `predict_dataloader` of the data return the loaders of a split; return the datamodule."""
    data, method = trained.data, f"{source}_dataloader"
    module: Any = lightning_datamodule(data)
    data.prepare_data()
    if trained.trained_on not in ("", data.name):
        warn(f"the network was trained on {trained.trained_on}, and answers samples of {data.name}")
    module.trainer = trainer  # a `setup` may read it, as in Lightning
    if not has_split(data, source):
        missing = "test set" if source == "test" else method  # a DataModule without a test set has the method, too
        raise UserError(f"input: got '{source}', and {data.name} has no {missing}")
    module.predict_dataloader = partial(pass_by_keyword, getattr(module, method))
    if source != "predict":
        data.setup(setup_stage(data, source))
        if not isinstance(data, DataModule):  # a DataModule's `setup` ignores the stage `predict`
            setup = module.setup
            module.setup = lambda stage: None if stage == "predict" else setup(stage)  # the split is already set up
    return module


def _failure_message(trained: Trained) -> str:
    """Return the reason for a prediction that fails."""
    name = type(trained.network).__name__
    if isinstance(trained.module, Task) or _has_predict_step(trained.module):
        return f"{name} does not take these samples"
    return f"{name} has no predict_step(batch, batch_idx), and its forward does not take the inputs of a batch"


def _has_predict_step(module: LightningModule) -> bool:
    return type(module).predict_step is not LightningModule.predict_step


def _set_predict_step(trained: Trained, has_target: bool) -> None:
    """Set the `predict_step` of a Task, and of a module without one, for batches with or without a target."""
    module: Any = trained.module
    step = type(module).predict_step  # a subclass of Task may have a step of its own

    def predict_step(batch: Any, batch_idx: int, *loader_idx: int) -> Any:
        inputs, lengths = batch_inputs(trained, batch, has_target)
        if isinstance(inputs, Mapping) and not inputs:  # `forward` names no field: do as Lightning's predict_step
            return trained.network(batch)
        args, kwargs = forward_arguments(inputs, lengths)
        return trained.network(*args, **kwargs)

    def task_predict_step(batch: Any, batch_idx: int, *loader_idx: int) -> Any:
        x, target, lengths = split_batch(trained.spec, batch, has_target)
        target = target.clone() if isinstance(target, Tensor) else target  # a worker's tensor keeps a file open
        output = step(module, (x,) if lengths is None else (x, lengths), batch_idx)
        output = output.get("output") if isinstance(output, Mapping) else output
        if trained.spec.target == "any":
            return output
        if not isinstance(output, Tensor):
            raise UserError(f"predict: the network answers a {type(output).__name__}, and a prediction is one tensor")
        output = output.float()
        if trained.spec.pads_steps:
            output = output.masked_fill(_padding_mask(output.shape[1], target, lengths)[..., None], math.nan)
        return {"output": output, "target": target}

    if isinstance(module, Task):
        module.predict_step = task_predict_step
    elif not _has_predict_step(module):
        module.predict_step = predict_step


def _padding_mask(steps: int, target: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Return which steps are padding: `(B, steps)` bool. A batch with a target may have no lengths."""
    if lengths is not None:
        return torch.arange(steps, device=lengths.device) >= lengths[:, None]
    if target is None:
        raise UserError("input: the sequences vary in length, and a batch has no lengths; takes (inputs, lengths)")
    return target == PADDING


def _join_batches(batches: list[dict[str, Any]]) -> tuple[Tensor, Tensor | None]:
    """Concatenate a Task's outputs and its targets of all batches."""
    outputs, targets = ([batch[name] for batch in batches] for name in ("output", "target"))
    return _concatenate(outputs, math.nan), None if targets[0] is None else _concatenate(targets, PADDING)


def _concatenate(batches: list[Tensor], padding: float) -> Tensor:
    """Concatenate batches; if their shapes differ, pad the sequences to the longest."""
    if all(batch.shape[1:] == batches[0].shape[1:] for batch in batches):
        return torch.cat(batches)
    return pad_sequence([sample for batch in batches for sample in batch], True, padding)


def _join_arrays(batches: list[Any], name: str) -> dict[str, np.ndarray]:
    """Concatenate the outputs of the module `name` for all batches to arrays with a row a sample, by name."""
    columns: dict[str, list[np.ndarray]] = {}
    for output in batches:
        output = {f"output_{i}": item for i, item in enumerate(output)} if isinstance(output, tuple) else output
        outputs = output if isinstance(output, Mapping) else {"output": output}
        arrays = {str(key): _to_array(value) for key, value in outputs.items()}
        lengths = {len(array) if array.ndim and array.dtype != object else None for array in arrays.values()}
        if len(lengths) != 1 or None in lengths or (columns and columns.keys() != arrays.keys()):
            shapes = {key: "an object" if array.dtype == object else array.shape for key, array in arrays.items()}
            raise UserError(
                f"model: {name} answers {shapes}, and predict takes a tensor with a row for each sample, or a dict or "
                "a tuple of them"
            )
        for key, array in arrays.items():
            columns.setdefault(key, []).append(array)
    with blamed("model", "its answers to two batches have shapes that do not go together"):
        return {key: np.concatenate(arrays) for key, arrays in columns.items()}


def _to_array(value: Any) -> np.ndarray:
    """Convert a tensor, or a list of numbers, texts or tensors, to an array; without dimensions if lengths differ."""
    value = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
    value = value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)


def write_predictions(predictions: Predictions, path: Path) -> None:
    """Write the table to a `.csv` file, or the arrays, with the samples' names as `sample`, to an `.npz` file.

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
            file.write(table.encode("utf-8", "surrogateescape"))  # file names may be any bytes
        else:
            arrays: dict[str, Any] = {"sample": np.asarray(predictions.names), **predictions.arrays}
            np.savez_compressed(file, **arrays)


def refuse_output(path: Path, trained: Trained) -> None:
    """Raise UserError unless predictions of a network can be written to this file; no existing file is replaced."""
    refuse_existing("output", path)
    needs_npz = not has_custom_output(trained) and trained.spec.target in _NO_TABLE
    if path.suffix not in (suffixes := FORMATS[1:] if needs_npz else FORMATS):
        reason = f": the target is {trained.spec.target}" if needs_npz else ""
        raise UserError(f"output: got '{path}', takes a name that ends in {' or '.join(suffixes)}{reason}")
