"""DataSpec: all that a model has to know of a dataset."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataSpec:
    """The shapes of a dataset and the kind of its targets.

    Attributes:
        kind: `image` or `sequence`.
        input_shape: of one sample, without the batch: `(C, H, W)` for an image, `(T, F)` for a sequence.
        target: `class` (a label for each sample), `class_per_step` (a label for each step) or `value` (a number for
            each sample).
        num_outputs: the size of the model's output for a sample (or a step): the number of classes, or 1 for a value.
        blank_class: the class of steps without an answer; accuracy leaves it out.
        classes: the names of the classes; empty: their numbers.
        mean, std: the normalisation of images, one number a channel; empty if they are not normalised.
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
