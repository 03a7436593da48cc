"""DataSpec: all that a model has to know of a dataset."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ..errors import UserError, did_you_mean

Kind = Literal["image", "sequence"]
Target = Literal["class", "class_per_step", "value"]

PADDING = -100  # the class of a step behind the end of a sequence; torch's losses leave it out
LENGTHS = "lengths"  # the field of a dict batch with the lengths of its sequences


@dataclass(frozen=True)
class DataSpec:
    """The shapes of a dataset and the kind of its targets.

    Raises:
        UserError: for a kind or a target that is none of these words.
    """

    kind: Kind
    input_shape: tuple[int, ...]  # of one sample: `(C, H, W)` for an image, `(T, F)` for a sequence
    target: Target  # a label for each sample or step, or a number for each sample
    num_outputs: int  # of the model, for a sample or a step: the number of classes, or 1 for a value
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
