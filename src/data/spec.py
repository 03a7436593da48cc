"""DataSpec: what a dataset says of itself, and all that a model has to know of it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataSpec:
    """The shapes and the question of a dataset.

    Attributes:
        kind: `image` or `sequence`.
        input_shape: of one sample, without the batch: `(C, H, W)` for an image, `(T, F)` for a sequence.
        target: `class` (one label a sample), `class_per_step` (a label a step) or `value` (one number a sample).
        num_outputs: how many numbers the model returns a sample (or a step): the classes, or 1 for a value.
        blank_class: a class that only fills steps at which there is nothing to answer; accuracy leaves it out.
        classes: the classes' names, for pictures; empty for their numbers.
        mean, std: what a shown image was normalised with, one number a channel; empty where it was not.
    """

    kind: Literal["image", "sequence"]
    input_shape: tuple[int, ...]
    target: Literal["class", "class_per_step", "value"]
    num_outputs: int
    blank_class: int | None = None
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def sequence_shape(self) -> tuple[int, int]:
        """`(T, F)`: an image is read row by row, `H` steps of `C·W` features."""
        if self.kind == "sequence":
            steps, features = self.input_shape
            return steps, features
        channels, height, width = self.input_shape
        return height, channels * width
