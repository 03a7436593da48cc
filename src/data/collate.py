"""From samples to a batch: stacked, or padded to the longest sequence; and whether it is what the DataSpec says."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from ..errors import UserError
from .spec import CLASSES, LENGTHS, PADDING, DataSpec
from .workers import data_error


def collate(samples: list[Any], spec: DataSpec) -> Any:
    """Samples `(x, y)`, or dicts with the fields of the spec, as one batch: `[x, y]`, `[x, y, lengths]` or a dict.

    Sequences of different lengths are padded behind their ends: inputs with 0, targets of steps with PADDING. Targets that
    are no classes are float32, and so are inputs in numpy's float64. Where the target is the input itself, samples may be
    `(x,)` or `x` alone, and the batch is `[x]`.
    """
    keys: tuple[Any, Any] = spec.fields or (0, 1)
    rest: dict[Any, Any] = {}
    if spec.fields:
        others = [{k: v for k, v in sample.items() if k not in keys} for sample in samples]
        rest = default_collate(others) if others[0] else {}
    if spec.target == "input":
        xs = default_collate([s[keys[0]] if isinstance(s, Mapping | list | tuple) else s for s in samples])
        return {**rest, keys[0]: _single(xs)} if spec.fields else [_single(xs)]
    xs, ys = ([sample[key] for sample in samples] for key in keys)
    if not spec.variable_length:
        x, y, lengths = default_collate(xs), default_collate(ys), None
    else:
        xs = [torch.as_tensor(x) for x in xs]
        x, lengths = pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs])
        per_step = spec.target == "class_per_step"
        ys = [torch.as_tensor(y) for y in ys]
        y = pad_sequence(ys, batch_first=True, padding_value=PADDING) if per_step else torch.stack(ys)
    if spec.target in CLASSES and y.is_floating_point():
        raise TypeError(f"its target is of {y.dtype}, and the spec says that it is a class")
    y, x = y.long() if spec.target in CLASSES else y.float(), _single(x)
    if not spec.fields:
        return [x, y] if lengths is None else [x, y, lengths]
    return {**rest, keys[0]: x, keys[1]: y} | ({} if lengths is None else {LENGTHS: lengths})


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def batch_of(samples: list[Any], sources: list[str], spec: DataSpec) -> Any:
    """The samples as one batch; UserError with the source of a sample that is not what the spec says."""
    try:
        batch = collate(samples, spec)
        wrong = check_batch(batch, spec)
    except Exception as error:
        _check_alone(samples, sources, spec)
        raise data_error(f"a sample of {sources[0]} fits in no batch", error) from error
    if wrong:
        _check_alone(samples, sources, spec)
        raise UserError(f"data: a sample of {sources[0]} is not what the spec says: {wrong}")
    return batch


def _check_alone(samples: list[Any], sources: list[str], spec: DataSpec) -> None:
    if len(samples) > 1:
        for sample, source in zip(samples, sources, strict=True):
            batch_of([sample], [source], spec)


def empty_batch(batch: Any) -> Any:
    """A batch of no samples with the shapes of this one."""
    return tree_map_only(Tensor, lambda tensor: tensor[:0], batch)


def check_batch(batch: Any, spec: DataSpec) -> str | None:
    """What is wrong with a batch by its spec, in words; None if nothing is."""
    try:
        x, y, lengths = spec.parts(batch)
    except (KeyError, IndexError, TypeError):
        known = (
            f"the fields {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        )
        wanted = " and ".join(map(repr, spec.fields)) if spec.fields else "an input and a target"
        return f"it has {known}, and the spec names {wanted}"
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return f"its input is a {type(x).__name__} and its target a {type(y).__name__}, and both have to be tensors"
    shape, wanted = tuple(x.shape[1:]), spec.input_shape
    if spec.variable_length:
        longest, features = wanted[0], wanted[1:]
        if not lengths.all():
            return "a sequence of it has no steps, and a model reads the last one"
        if shape[1:] != features or shape[0] > longest:
            return f"its sequences have the shape {shape}, and the spec says at most {longest} steps of {features}"
    elif shape != tuple(wanted):
        return f"its inputs have the shape {shape}, and the spec says {tuple(wanted)}"
    of_target = (shape[0],) if spec.variable_length and spec.target == "class_per_step" else spec.target_shape
    if tuple(y.shape[1:]) != of_target:
        return f"its targets have the shape {tuple(y.shape[1:])}, and a target that is {spec.target} has {of_target}"
    steps = y[y != PADDING] if lengths is not None else y
    wrong = wrong_labels(spec, steps)
    return None if wrong is None else f"it has {in_words(spec, steps, wrong)}"


def wrong_labels(spec: DataSpec, y: Tensor) -> Tensor | None:
    """The indices `(n, dims)` of labels that are no class, or neither 0 nor 1 of several; None if there is none. On a GPU
    they would raise an assertion many steps later, without a name. A pixel may have no class: PADDING.
    """
    if not (spec.target in CLASSES or spec.target == "multilabel") or not y.numel():
        return None
    wrong = (y < 0) | (y >= (2 if spec.target == "multilabel" else spec.num_outputs))
    if spec.target == "multilabel":
        wrong |= y != y.round()
    if spec.target == "class_per_pixel":
        wrong &= y != PADDING
    indices = wrong.nonzero()
    return indices if len(indices) else None


def in_words(spec: DataSpec, y: Tensor, wrong: Tensor) -> str:
    """The first wrong label, and those that there are: `the label 77, and the classes are 0 to 8`."""
    known = "labels are 0 or 1" if spec.target == "multilabel" else f"the classes are 0 to {spec.num_outputs - 1}"
    return f"the label {y[tuple(wrong[0])].item():g}, and {known}"
