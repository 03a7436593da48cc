"""Collate samples to a batch, stacked or padded to the longest sequence, and check the batch against the DataSpec."""

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
    """Return samples as one batch: a list for tuples in the order of the spec's fields, a dict for dicts of them.

    Where lengths vary, the batch also has `lengths: (B,)` of the first input. They are the lengths in the samples,
    whose inputs may be padded already, or else the steps of the inputs. Every field is padded at its end: inputs with
    0, targets of steps with PADDING. Targets other than classes become float32. Of inputs, and of targets of the kind
    `any`, only float64 becomes float32. Where the target is the input itself, samples may be `(x,)` or `x`, and the
    batch is `[x]`. Further fields of a dict become lists.
    """
    mappings = [spec.named(sample) for sample in samples]
    columns = {name: [mapping[name] for mapping in mappings] for name in spec.read}
    fields = {name: cast_field(_stack_field(columns[name], spec), name, spec) for name in spec.inputs}
    if spec.target != "input":
        target = spec.fields[-1]
        y = _stack_field(columns[target], spec, PADDING if spec.target == "class_per_step" else 0, spec.target == "any")
        if spec.target != "any" and not isinstance(y, Tensor):
            raise TypeError(f"its target is a {type(columns[target][0]).__name__}, and has to be a number or a tensor")
        if spec.target in CLASSES and y.is_floating_point():
            raise TypeError(f"its target is of {y.dtype}, and the spec says that it is a class")
        fields[target] = cast_field(y, target, spec)
    if spec.variable_length:
        fields[LENGTHS] = torch.tensor([_sample_length(mapping, spec) for mapping in mappings])
    if not isinstance(samples[0], Mapping):
        return [*fields.values()]
    extra_fields = {name: [sample[name] for sample in samples] for name in samples[0] if name not in fields}
    return fields | extra_fields  # the length of the first tensor is the number of samples


def _sample_length(sample: Mapping[str, Any], spec: DataSpec) -> int:
    """Return the number of steps of a sample's first input without padding."""
    steps = len(sample[spec.inputs[0]])
    if (length := index(sample.get(LENGTHS, steps))) > steps:
        raise ValueError(f"it has the length {length}, and {steps} steps")
    return length


def cast_field(values: Any, field: str, spec: DataSpec) -> Any:
    """Return a field of a batch in the dtype that it is trained in. Floating-point classes are not rounded."""
    if field in spec.inputs or spec.target == "any":
        return tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor, values)
    if spec.target in CLASSES:
        return values if values.is_floating_point() else values.long()
    return values.float()


def _stack_field(values: list[Any], spec: DataSpec, padding: int = 0, may_be_tuple: bool = False) -> Any:
    """Stack the values of a field: to one tensor, or to a dict or, if it `may_be_tuple`, a tuple or list of tensors."""
    value = values[0]
    is_tuple = isinstance(value, tuple) or (isinstance(value, list) and any(isinstance(y, Tensor) for y in value))
    if not spec.variable_length or isinstance(value, Mapping) or (may_be_tuple and is_tuple):
        return default_collate(values)
    tensors = [torch.as_tensor(value) for value in values]
    if padding and not tensors[0].is_floating_point():  # uint8 cannot represent PADDING
        tensors = [tensor.long() for tensor in tensors]
    return pad_sequence(tensors, True, padding) if tensors[0].dim() else torch.stack(tensors)


def make_batch(samples: list[Any], sources: list[str], spec: DataSpec, collate_fn: Collate | None = None) -> Any:
    """Return the samples as one batch, by the user's `collate_fn` if there is one; UserError names a wrong sample."""
    subject, failure = f"a sample of {sources[0]}", f"a sample of {sources[0]} fits in no batch"
    if collate_fn is not None:
        subject, failure = f"the batch that collate_fn makes of {sources[0]}", f"collate_fn fails for {sources[0]}"
    try:
        batch = collate(samples, spec) if collate_fn is None else collate_fn(samples)
        if isinstance(batch, Mapping) and type(batch) is not dict:  # such as transformers' BatchEncoding
            batch = dict(batch)
        fault = check_batch(batch, spec)
    except Exception as error:
        if is_shared_memory_error(error):  # the worker's fault, not a sample's
            raise
        _check_each_sample(samples, sources, spec, collate_fn)
        if collate_fn is None and (fault := missing_field(samples[0], spec)):
            raise UserError(f"data: {subject} is not what the spec says: {fault}") from error
        raise data_error(failure, error) from error
    if fault:
        _check_each_sample(samples, sources, spec, collate_fn)
        raise UserError(f"data: {subject} is not what the spec says: {fault}")
    if len(samples) > 1 and not len(spec.named(batch)[spec.inputs[0]]):  # the mean loss of an empty batch is NaN
        raise UserError(f"data: {subject} has no samples")
    return batch


def _check_each_sample(samples: list[Any], sources: list[str], spec: DataSpec, collate_fn: Collate | None) -> None:
    if len(samples) > 1:
        for sample, source in zip(samples, sources, strict=True):
            make_batch([sample], [source], spec, collate_fn)


def missing_field(batch: Any, spec: DataSpec) -> str | None:
    """Return in words that a sample or a batch lacks a field; None if it has all."""
    try:
        if {*spec.read} <= {*spec.named(batch)}:
            return None
    except TypeError:
        pass
    *names, last_name = map(repr, spec.read)
    content = f"the type {type(batch).__name__}"
    if isinstance(batch, Mapping):
        content = f"the fields {', '.join(map(repr, batch))}"
    elif isinstance(batch, tuple | list):
        content = f"{len(batch)} part{'s' * (len(batch) != 1)}"
    return f"it has {content}, and the spec names {', '.join(names)}{' and ' if names else ''}{last_name}"


def check_batch(batch: Any, spec: DataSpec) -> str | None:
    """Return the first fault of a batch against its spec, in words; None if there is none."""
    return missing_field(batch, spec) or next(_find_faults(spec.named(batch), spec), None)


def _find_faults(batch: Mapping[str, Any], spec: DataSpec) -> Iterator[str]:
    """Yield the faults of a batch's fields, in words. Each check assumes that the checks before it have passed."""
    fields = {name: batch[name] for name in (spec.inputs if spec.target == "any" else spec.read)}
    for name, value in fields.items():
        if not isinstance(value, Tensor):
            yield f"its '{name}' is a {type(value).__name__}, and has to be a tensor"
        if not value.dim():
            yield f"its '{name}' has no samples, but the shape ()"
    x, y, num_samples = batch[spec.inputs[0]], batch[spec.read[-1]], len([*fields.values()][-1])
    for name, value in fields.items():
        if len(value) != num_samples:
            yield f"its '{name}' has the shape {tuple(value.shape)}, and its target is of {num_samples} samples"
    shape, expected = tuple(x.shape[1:]), spec.input_shape
    if spec.variable_length:
        yield from _find_length_faults(x, batch.get(LENGTHS), len(spec.inputs) > 1)
        if shape[1:] != expected[1:] or shape[0] > expected[0]:
            limit = f"at most {expected[0]} steps of {expected[1:]}"
            yield f"its sequences have the shape {shape}, and the spec says {limit}"
    elif shape != expected:
        yield f"its inputs have the shape {shape}, and the spec says {expected}"
    if spec.target == "any":
        return
    target_shape = shape[:1] if spec.pads_steps else spec.target_shape
    if tuple(y.shape[1:]) != target_shape:
        yield f"its targets have the shape {tuple(y.shape[1:])}, and a target that is {spec.target} has {target_shape}"
    if spec.target not in (*CLASSES, *LABELS):
        return
    # On a GPU, an invalid class would fail an assertion many steps later, which does not name the sample. A pixel or a
    # step without a class has PADDING.
    is_invalid = (y < 0) | (y >= spec.num_classes)
    if spec.target in LABELS and y.is_floating_point():
        is_invalid |= y != y.round()
    if spec.has_padding:
        is_invalid &= y != PADDING
    if is_invalid.any():
        valid_labels = "labels are 0 or 1" if spec.target in LABELS else f"the classes are 0 to {spec.num_classes - 1}"
        yield f"it has the label {y[is_invalid][0].item():g}, and {valid_labels}"


def _find_length_faults(x: Tensor, lengths: Any, is_optional: bool) -> Iterator[str]:
    """Yield the faults of lengths, in words. With several inputs lengths are optional: an input may be a mask."""
    if lengths is None and not is_optional:
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
