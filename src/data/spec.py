"""DataSpec: all that a model has to know of a dataset."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ..errors import UserError, did_you_mean

Kind = Literal["image", "sequence", "tensor"]
Target = Literal["class", "class_per_step", "class_per_pixel", "multilabel", "value", "vector", "input"]
CLASSES = ("class", "class_per_step", "class_per_pixel")  # targets that are numbers of classes

PADDING = (
    -100
)  # the class of a step behind the end of a sequence, or of a pixel without one; torch's losses leave it out
LENGTHS = "lengths"  # the field of a dict batch with the lengths of its sequences


@dataclass(frozen=True)
class DataSpec:
    """The shapes of a dataset and the kind of its targets.

    | target | of a batch | the model's output | loss |
    | --- | --- | --- | --- |
    | `class` | `(B,)` | `(B, N)` | cross-entropy |
    | `class_per_step` | `(B, T)` | `(B, T, N)` | cross-entropy |
    | `class_per_pixel` | `(B, H, W)` | `(B, N, H, W)` | cross-entropy |
    | `multilabel` | `(B, N)`, each 0 or 1 | `(B, N)` logits | binary cross-entropy |
    | `value` | `(B,)` | `(B, 1)` | mean squared error |
    | `vector` | `(B, N)` | `(B, N)` | mean squared error |
    | `input` | the input itself | as the input | mean squared error |

    Raises:
        UserError: for a kind or a target that is none of these words, and for shapes that do not go with them.
    """

    kind: Kind
    input_shape: tuple[int, ...]  # of one sample: `(C, H, W)` for an image, `(T, F)` for a sequence, any for a tensor
    target: Target
    num_outputs: int = 0  # N: the number of classes, labels or values; where the target is the input, its numbers
    blank_class: int | None = None  # of steps without an answer; accuracy leaves it out
    classes: tuple[str, ...] = ()  # their names; empty: their numbers
    mean: tuple[float, ...] = ()  # of the images that were normalised, one number a channel; empty if they were not
    std: tuple[float, ...] = ()  # as `mean`
    fields: tuple[str, str] | None = None  # where a batch is a dict: the names of its input and its target
    variable_length: bool = False  # sequences of at most T steps, padded to the longest of a batch, with their lengths

    def __post_init__(self) -> None:
        for field, got, known in (("kind", self.kind, get_args(Kind)), ("target", self.target, get_args(Target))):
            if got not in known:
                hint = did_you_mean(str(got), known)
                raise UserError(
                    f"data: DataSpec.{field}: got {got!r}, takes {', '.join(known[:-1])} or {known[-1]}.{hint}"
                )
        if self.target == "input" and not self.num_outputs:
            object.__setattr__(self, "num_outputs", math.prod(self.input_shape))
        if self.num_outputs < 1 or (self.target == "value" and self.num_outputs > 1):
            takes = "1 for a value; several are a vector" if self.target == "value" else "1 or more"
            raise UserError(f"data: DataSpec.num_outputs: got {self.num_outputs}, takes {takes}")
        if self.target == "class_per_pixel" and len(self.input_shape) < 2:
            raise UserError(f"data: DataSpec.input_shape: got {self.input_shape}, and class_per_pixel takes (C, H, W)")
        if self.variable_length and self.target in ("class_per_pixel", "input"):
            raise UserError(f"data: DataSpec.variable_length: got True, takes False where the target is {self.target}")

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of the target of one sample; steps are those of a whole sequence."""
        match self.target:
            case "class" | "value":
                return ()
            case "class_per_step":
                return (self.input_shape[self.kind == "image"],)  # of an image, its rows
            case "class_per_pixel":
                return self.input_shape[1:]
        return self.input_shape if self.target == "input" else (self.num_outputs,)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a model's output for one sample; steps are those of a whole sequence."""
        if self.target == "class_per_step":
            return (*self.target_shape, self.num_outputs)
        return (self.num_outputs, *self.target_shape) if self.target in (*CLASSES, "value") else self.target_shape

    @property
    def sequence_shape(self) -> tuple[int, int]:
        """`(T, F)`: an image is read row by row, `H` steps of `C·W` features."""
        if self.kind == "sequence":
            steps, features = self.input_shape
            return steps, features
        channels, height, width = self.input_shape
        return height, channels * width

    def parts(self, batch: Any) -> tuple[Any, Any, Any]:
        """The input, the target and the lengths `(B,)` of a batch; None in place of lengths that do not vary."""
        if self.target == "input":
            x = batch[self.fields[0]] if self.fields else batch[0] if isinstance(batch, list | tuple) else batch
            return x, x, None
        keys: tuple[Any, ...] = (*self.fields, LENGTHS) if self.fields else (0, 1, 2)
        return batch[keys[0]], batch[keys[1]], batch[keys[2]] if self.variable_length else None


_TEXTS, _NUMBERS = ("classes", "fields"), ("mean", "std")


def spec_from(values: Mapping[str, Any]) -> DataSpec:
    """The DataSpec of a file's plain values, as `dataclasses.asdict` writes them.

    Raises:
        TypeError, ValueError: if they are not those of a DataSpec.
    """
    if not isinstance(values, Mapping) or not {*values} <= {field.name for field in fields(DataSpec)}:
        raise TypeError("not the values of a DataSpec")
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list | tuple)}
    shape, blank = lists.get("input_shape", ()), values.get("blank_class")
    texts = [text for key in _TEXTS for text in lists.get(key, ())]
    numbers = [number for key in _NUMBERS for number in lists.get(key, ())]
    right = (
        bool(shape)
        and all(type(size) is int and size > 0 for size in (*shape, values.get("num_outputs")))
        and (blank is None or type(blank) is int)
        and all(isinstance(text, str) and text.isprintable() for text in texts)
        and all(isinstance(number, int | float) for number in numbers)
        and type(values.get("variable_length", False)) is bool
    )
    if not right:
        raise ValueError("a value is of another kind")
    given: dict[str, Any] = {**values, **lists}
    return DataSpec(**given)
