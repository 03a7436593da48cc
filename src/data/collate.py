"""From samples to a batch: stacked, or padded to the longest sequence; and whether it is what the DataSpec says."""

from collections.abc import Callable, Iterator, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from .._torch import is_shared_memory_error
from ..errors import UserError
from .spec import CLASSES, LABELS, LENGTHS, PADDING, DataSpec
from .workers import data_error

Collate = Callable[[list[Any]], Any]
_NO_STEPS = "a sequence of it has no steps, and a model reads the last one"


def collate(samples: list[Any], spec: DataSpec) -> Any:
    """Samples as one batch: tuples in the order of the spec's fields as a list, dicts with these fields as a dict.

    Where lengths vary, the batch has the `lengths: (B,)` of the first input, too: those that the samples hold, whose inputs
    may be padded already, or else the steps of the inputs. Every field is padded behind its end: inputs with 0, targets of
    steps with PADDING. Targets that are no classes are float32; inputs, and targets that are `any`, only in place of float64.
    Where the target is the input itself, samples may be `(x,)` or `x` alone, and the batch is `[x]`. Other fields of a dict
    are lists.
    """
    named = [spec.named(sample) for sample in samples]
    columns = {name: [sample[name] for sample in named] for name in spec.read}
    fields = {name: cast(_stacked(columns[name], spec), name, spec) for name in spec.inputs}
    if spec.target != "input":
        target = spec.fields[-1]
        y = _stacked(columns[target], spec, PADDING if spec.target == "class_per_step" else 0, spec.target == "any")
        if spec.target != "any" and not isinstance(y, Tensor):
            raise TypeError(f"its target is a {type(columns[target][0]).__name__}, and has to be a number or a tensor")
        if spec.target in CLASSES and y.is_floating_point():
            raise TypeError(f"its target is of {y.dtype}, and the spec says that it is a class")
        fields[target] = cast(y, target, spec)
    if spec.variable_length:
        fields[LENGTHS] = torch.tensor([_length(sample, spec) for sample in named])
    if not isinstance(samples[0], Mapping):
        return [*fields.values()]
    others = {name: [sample[name] for sample in samples] for name in samples[0] if name not in fields}
    return fields | others  # the first tensor is of as many samples as the batch


def _length(sample: Mapping[str, Any], spec: DataSpec) -> int:
    """The steps of a sample's first input that are no padding."""
    steps = len(sample[spec.inputs[0]])
    if (length := index(sample.get(LENGTHS, steps))) > steps:
        raise ValueError(f"it has the length {length}, and {steps} steps")
    return length


def cast(values: Any, field: str, spec: DataSpec) -> Any:
    """A field of a batch in the dtype that is trained on. No label is rounded to a class."""
    if field in spec.inputs or spec.target == "any":
        return tree_map_only(Tensor, lambda one: one.float() if one.dtype == torch.float64 else one, values)
    if spec.target in CLASSES:
        return values if values.is_floating_point() else values.long()
    return values.float()


def _stacked(values: list[Any], spec: DataSpec, padding: int = 0, may_be_several: bool = False) -> Any:
    """A field of all samples: one tensor, or those of a dict and, if it `may_be_several`, of a tuple or a list of tensors."""
    first = values[0]
    are_several = isinstance(first, tuple) or (isinstance(first, list) and any(isinstance(y, Tensor) for y in first))
    if not spec.variable_length or isinstance(first, Mapping) or (may_be_several and are_several):
        return default_collate(values)
    tensors = [torch.as_tensor(value) for value in values]
    if padding and not tensors[0].is_floating_point():  # uint8 has no PADDING
        tensors = [tensor.long() for tensor in tensors]
    return pad_sequence(tensors, True, padding) if tensors[0].dim() else torch.stack(tensors)


def batch_of(samples: list[Any], sources: list[str], spec: DataSpec, own: Collate | None = None) -> Any:
    """The samples as one batch, made by a user's `collate_fn` if there is one; UserError names a wrong sample."""
    what, fails = f"a sample of {sources[0]}", f"a sample of {sources[0]} fits in no batch"
    if own is not None:
        what, fails = f"the batch that collate_fn makes of {sources[0]}", f"collate_fn fails for {sources[0]}"
    try:
        batch = collate(samples, spec) if own is None else own(samples)
        if isinstance(batch, Mapping) and type(batch) is not dict:  # such as transformers' BatchEncoding
            batch = dict(batch)
        wrong = check_batch(batch, spec)
    except Exception as error:
        if is_shared_memory_error(error):  # of a worker; no sample is at fault
            raise
        _check_alone(samples, sources, spec, own)
        if own is None and (wrong := missing_field(samples[0], spec)):
            raise UserError(f"data: {what} is not what the spec says: {wrong}") from error
        raise data_error(fails, error) from error
    if wrong:
        _check_alone(samples, sources, spec, own)
        raise UserError(f"data: {what} is not what the spec says: {wrong}")
    if len(samples) > 1 and not len(spec.named(batch)[spec.inputs[0]]):  # the mean loss of none is NaN
        raise UserError(f"data: {what} has no samples")
    return batch


def _check_alone(samples: list[Any], sources: list[str], spec: DataSpec, own: Collate | None) -> None:
    if len(samples) > 1:
        for sample, source in zip(samples, sources, strict=True):
            batch_of([sample], [source], spec, own)


def missing_field(batch: Any, spec: DataSpec) -> str | None:
    """That a sample or a batch lacks a field, in words."""
    try:
        if {*spec.read} <= {*spec.named(batch)}:
            return None
    except TypeError:
        pass
    *others, last = map(repr, spec.read)
    held = f"the type {type(batch).__name__}"
    if isinstance(batch, Mapping):
        held = f"the fields {', '.join(map(repr, batch))}"
    elif isinstance(batch, tuple | list):
        held = f"{len(batch)} part{'s' * (len(batch) != 1)}"
    return f"it has {held}, and the spec names {', '.join(others)}{' and ' if others else ''}{last}"


def check_batch(batch: Any, spec: DataSpec) -> str | None:
    """What is wrong with a batch by its spec, in words; None if nothing is."""
    return missing_field(batch, spec) or next(_faults(spec.named(batch), spec), None)


def _faults(named: Mapping[str, Any], spec: DataSpec) -> Iterator[str]:
    """What is wrong with the fields of a batch, in words. Each takes for granted that nothing before it is wrong."""
    fields = {name: named[name] for name in (spec.inputs if spec.target == "any" else spec.read)}
    for name, value in fields.items():
        if not isinstance(value, Tensor):
            yield f"its '{name}' is a {type(value).__name__}, and has to be a tensor"
        if not value.dim():
            yield f"its '{name}' has no samples, but the shape ()"
    x, y, samples = named[spec.inputs[0]], named[spec.read[-1]], len([*fields.values()][-1])
    for name, value in fields.items():
        if len(value) != samples:
            yield f"its '{name}' has the shape {tuple(value.shape)}, and its target is of {samples} samples"
    shape, wanted = tuple(x.shape[1:]), spec.input_shape
    if spec.variable_length:
        yield from _wrong_lengths(x, named.get(LENGTHS), len(spec.inputs) > 1)
        if shape[1:] != wanted[1:] or shape[0] > wanted[0]:
            yield f"its sequences have the shape {shape}, and the spec says at most {wanted[0]} steps of {wanted[1:]}"
    elif shape != wanted:
        yield f"its inputs have the shape {shape}, and the spec says {wanted}"
    if spec.target == "any":
        return
    of_target = shape[:1] if spec.pads_steps else spec.target_shape
    if tuple(y.shape[1:]) != of_target:
        yield f"its targets have the shape {tuple(y.shape[1:])}, and a target that is {spec.target} has {of_target}"
    if spec.target not in (*CLASSES, *LABELS):
        return
    # On a GPU a label that is no class would raise an assertion many steps later, without a name. A pixel and a step
    # may have no class: PADDING.
    wrong = (y < 0) | (y >= spec.num_classes)
    if spec.target in LABELS and y.is_floating_point():
        wrong |= y != y.round()
    if spec.has_padding:
        wrong &= y != PADDING
    if wrong.any():
        known = "labels are 0 or 1" if spec.target in LABELS else f"the classes are 0 to {spec.num_classes - 1}"
        yield f"it has the label {y[wrong][0].item():g}, and {known}"


def _wrong_lengths(x: Tensor, lengths: Any, may_lack: bool) -> Iterator[str]:
    """What is wrong with lengths, in words. Several inputs may do without: one of them may be a mask."""
    if lengths is None and not may_lack:
        yield f"it has no '{LENGTHS}', and the spec says that they vary"
    if x.dim() < 2 or not x.shape[1]:
        yield _NO_STEPS
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.shape != x.shape[:1] or lengths.is_floating_point():
        yield f"its '{LENGTHS}' have to be whole numbers in a tensor of the shape ({len(x)},)"
    if (lengths < 1).any():
        yield _NO_STEPS
    if (lengths > x.shape[1]).any():
        yield f"it has the length {int(lengths.max())}, and its sequences have {x.shape[1]} steps"
