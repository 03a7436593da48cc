"""DataSpec: all that a model has to know of a dataset, and the arguments of its `forward` for a batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from unicodedata import category

from torch import Tensor

from ..errors import UserError, did_you_mean
from ..options.signatures import live_parameters

Kind = Literal["image", "sequence", "tensor"]
Target = Literal[
    "class", "class_per_step", "class_per_pixel", "multilabel", "multilabel_per_pixel", "value", "vector", "input",
    "any",
]  # fmt: skip
CLASSES = ("class", "class_per_step", "class_per_pixel")  # targets that are numbers of classes
LABELS = ("multilabel", "multilabel_per_pixel")  # targets whose numbers are 0 or 1

PADDING = -100  # in place of a class: a pixel or step without one, or padding of a sequence; torch's losses ignore it
LENGTHS = "lengths"  # the field of a batch with the lengths of its sequences, those of the first input
_TUPLE_FIELDS = ("input_shape", "classes", "mean", "std", "fields")
_MAX_SIZE = 2**40  # torch counts in 64 bits


@dataclass(frozen=True)
class DataSpec:
    """The shapes of a dataset and the kind of its targets.

    | target | target of a batch | the model's output | loss |
    | --- | --- | --- | --- |
    | `class` | `(B,)` | `(B, N)` | cross-entropy |
    | `class_per_step` | `(B, T)` | `(B, T, N)` | cross-entropy |
    | `class_per_pixel` | `(B, H, W)` | `(B, N, H, W)` | cross-entropy |
    | `multilabel` | `(B, N)`, each 0 or 1 | `(B, N)` logits | binary cross-entropy |
    | `multilabel_per_pixel` | `(B, N, H, W)`, each 0 or 1 | `(B, N, H, W)` logits | binary cross-entropy |
    | `value` | `(B,)` | `(B, 1)` | mean squared error |
    | `vector` | `(B, N)` | `(B, N)` | mean squared error |
    | `input` | the input itself | as the input | mean squared error |
    | `any` | a tensor, or a dict, list or tuple of them | what the loss takes | one of your own |

    N = 1 means two classes: the model's output is one logit, that of class 1, and the loss is binary cross-entropy.

    Raises:
        UserError: for an unknown kind or target, for shapes that do not fit them, and for duplicate field names.
    """

    kind: Kind
    # The shape of one sample, of its first input if there are several: `(C, H, W)` for an image, `(T, F)` or `(T,)` for
    # a sequence, any shape for a tensor. A sequence `(T,)` holds token indices, for a model with an embedding.
    input_shape: tuple[int, ...]
    target: Target
    num_outputs: int = 0  # N: the number of classes (1: one logit for two), labels or values; of `input`, its size
    blank_class: int | None = None  # the class of steps without an answer; accuracy ignores them
    classes: tuple[str, ...] = ()  # the names of the classes; if empty, their numbers are used
    mean: tuple[float, ...] = ()  # the mean that images were normalised by, a number a channel; empty if they were not
    std: tuple[float, ...] = ()  # their standard deviation, as `mean`
    fields: tuple[str, ...] = ("x", "y")  # names of the inputs and, at the end, of the target
    variable_length: bool = False  # sequences of at most T steps, padded to the longest of a batch, with their lengths

    def __post_init__(self) -> None:
        for name in _TUPLE_FIELDS:  # YAML has lists
            if not isinstance(values := getattr(self, name), list | tuple):
                raise UserError(f"data: DataSpec.{name}: got {values!r}, takes a tuple")
            object.__setattr__(self, name, tuple(values))
        for field, value, choices in (("kind", self.kind, get_args(Kind)), ("target", self.target, get_args(Target))):
            if value not in choices:
                hint = did_you_mean(str(value), choices)
                raise UserError(
                    f"data: DataSpec.{field}: got {value!r}, takes {', '.join(choices[:-1])} or {choices[-1]}.{hint}"
                )
        if self.target in ("input", "any") and not self.num_outputs:
            object.__setattr__(self, "num_outputs", math.prod(self.input_shape) if self.target == "input" else 1)
        is_image, is_per_pixel = self.kind == "image", self.target.endswith("_per_pixel")
        outputs, sizes, names = self.num_outputs, self.input_shape, {*self.fields} - {LENGTHS}
        are_identifiers = isinstance(self.fields, tuple) and all(
            isinstance(name, str) and name.isidentifier() for name in names
        )
        are_sizes = (
            isinstance(sizes, tuple)
            and bool(sizes or self.kind == "tensor")
            and all(type(size) is int and 0 < size <= _MAX_SIZE for size in sizes)
        )
        for field, is_valid, expected in (
            ("input_shape", are_sizes, "whole numbers of Python, each 1 or more"),
            ("input_shape", not is_image or len(sizes) == 3, "(C, H, W) of an image"),
            ("classes", _are_names(self.classes), "texts without control characters"),
            ("mean", _are_numbers(self.mean, sizes[0] if is_image and sizes else None), "a number a channel"),
            ("std", _are_numbers(self.std, None) and len(self.std) == len(self.mean), "as many numbers as `mean`"),
            (
                "fields",
                are_identifiers and len(self.fields) == len(names) >= (1 if self.target == "input" else 2),
                f"the names of the inputs and, at the end, of the target, each once; '{LENGTHS}' is taken",
            ),
            ("num_outputs", type(outputs) is int and 0 < outputs <= _MAX_SIZE, "a whole number of Python, 1 or more"),
            ("blank_class", type(self.blank_class) in (int, type(None)), "the number of a class, or None"),
            ("num_outputs", self.target != "value" or outputs == 1, "1 for a value; several are a vector"),
            ("input_shape", not is_per_pixel or len(sizes) >= 2, f"(C, H, W) where the target is {self.target}"),
            (
                "variable_length",
                not (self.variable_length and (is_per_pixel or self.target == "input")),
                f"False where the target is {self.target}",
            ),
        ):
            if not is_valid:
                raise UserError(f"data: DataSpec.{field}: got {getattr(self, field)!r}, takes {expected}")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs. `forward` gets a single input by position, and several by name."""
        return self.fields[:1] if self.target == "input" else self.fields[:-1]

    @property
    def read(self) -> tuple[str, ...]:
        """The names of the fields that a batch must have."""
        return self.inputs if self.target == "input" else self.fields

    @property
    def is_one_logit(self) -> bool:
        """Whether a model's output is one logit for two classes."""
        return self.target in CLASSES and self.num_outputs == 1

    @property
    def num_classes(self) -> int:
        """The number of values that a label can have, for a target of CLASSES or LABELS."""
        return 2 if self.is_one_logit or self.target in LABELS else self.num_outputs

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one sample's target, unless it is `any`; T is that of a sequence of full length."""
        match self.target:
            case "class" | "value":
                return ()
            case "class_per_step":
                return (self.input_shape[self.kind == "image"],)  # the steps of an image are its rows
            case "class_per_pixel":
                return self.input_shape[1:]
            case "multilabel_per_pixel":
                return (self.num_outputs, *self.input_shape[1:])
        return self.input_shape if self.target == "input" else (self.num_outputs,)

    @property
    def pads_steps(self) -> bool:
        """Whether targets have a class for each step, and PADDING up to the longest sequence of the batch."""
        return self.variable_length and self.target == "class_per_step"

    @property
    def has_padding(self) -> bool:
        """Whether targets may hold PADDING."""
        return self.target in ("class_per_step", "class_per_pixel")

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a model's output for one sample; T is that of a sequence of full length."""
        if self.target == "class_per_step":
            return (*self.target_shape, self.num_outputs)
        return (self.num_outputs, *self.target_shape) if self.target in (*CLASSES, "value") else self.target_shape

    def class_of(self, output: Any) -> Any:
        """Return the predicted classes, in the shape of the target, from a model's output for a target of CLASSES."""
        if self.is_one_logit:
            return (self.without_n(output) > 0).long()
        return output.argmax(dim=self._outputs_dim)

    def without_n(self, output: Any) -> Any:
        """Return an output of one value or one logit without its dimension N = 1, which a model may leave out."""
        return output.squeeze(self._outputs_dim) if output.dim() > len(self.output_shape) else output

    @property
    def _outputs_dim(self) -> int:
        return 1 if self.target == "class_per_pixel" else -1

    @property
    def sequence_shape(self) -> tuple[int, int]:
        """`(T, F)`: an image is read row by row, as `H` steps of `C·W` features."""
        if self.kind == "sequence":
            if len(self.input_shape) != 2:
                raise UserError(
                    f"model: reads sequences (T, F), and the data's have the shape {self.input_shape}: token numbers are "
                    "for a model with an embedding"
                )
            return self.input_shape[0], self.input_shape[1]
        channels, height, width = self.input_shape
        return height, channels * width

    def parts(self, batch: Any) -> tuple[Any, Any, Any]:
        """Return the inputs, the target and the lengths `(B,)` of a batch; None in place of missing lengths.

        A single input is a tensor, several are a dict of name → tensor. Targets of steps behind the end of their
        sequence are PADDING.
        """
        fields = self.named(batch)
        inputs = {name: fields[name] for name in self.inputs}
        x = inputs if len(inputs) > 1 else inputs[self.inputs[0]]
        if self.target == "input":
            return x, x, None
        y, lengths = fields[self.fields[-1]], fields.get(LENGTHS) if self.variable_length else None
        are_tensors = isinstance(lengths, Tensor) and isinstance(y, Tensor)
        if self.pads_steps and are_tensors and y.dim() == 2 and len(y) == len(lengths):
            y = y if y.is_floating_point() else y.long()
            y = y.masked_fill(y.new_ones(y.shape).cumsum(1) > lengths.to(y.device)[:, None], PADDING)
        return x, y, lengths

    def named(self, batch: Any) -> Mapping[str, Any]:
        """Return a sample or a batch as a mapping of field name → value; a tuple or list is in the fields' order.

        If the target is the input itself, `batch` may be the input alone. Raises TypeError for anything else.
        """
        if isinstance(batch, Mapping):
            return batch
        if self.target == "input" and not isinstance(batch, list | tuple):
            batch = (batch,)
        if not isinstance(batch, list | tuple):
            raise TypeError(f"a {type(batch).__name__} has no fields")
        return dict(zip((*self.fields, LENGTHS), batch, strict=False))


def _are_names(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(v, str) and "Cc" not in map(category, v) for v in values)


def _are_numbers(values: Any, count: int | None) -> bool:
    """Whether values is a tuple of 0, 1 or `count` numbers; of any length if `count` is None."""
    are_numbers = isinstance(values, tuple) and all(isinstance(value, int | float) for value in values)
    return are_numbers and (count is None or len(values) in (0, 1, count))


def forward_arguments(inputs: Any, lengths: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of `forward` for the inputs and lengths of `DataSpec.parts`."""
    kwargs = {} if lengths is None else {LENGTHS: lengths}
    return ((), {**inputs, **kwargs}) if isinstance(inputs, Mapping) else ((inputs,), kwargs)


def computed_shape(module: Any, spec: DataSpec) -> tuple[int, ...]:
    """Return the shape of a sample that a module computes on: its `input_shape`, a tuple of sizes, or the data's."""
    shape = getattr(module, "input_shape", None)
    return shape if isinstance(shape, tuple) and all(type(size) is int for size in shape) else spec.input_shape


def accepts_argument(network: Any, name: str) -> bool:
    """Whether a network's `forward` has a parameter of this name or `**kwargs`; True if Python cannot tell."""
    parameters = live_parameters(network.forward)
    return parameters is None or name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
