"""DataSpec: all that a model has to know of a dataset."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataSpec:
    """The shapes of a dataset and the kind of its targets."""

    kind: Literal["image", "sequence"]
    input_shape: tuple[int, ...]  # of one sample: `(C, H, W)` for an image, `(T, F)` for a sequence
    target: Literal["class", "class_per_step", "value"]  # a label for each sample or step, or a number for each sample
    num_outputs: int  # of the model, for a sample or a step: the number of classes, or 1 for a value
    blank_class: int | None = None  # of steps without an answer; accuracy leaves it out
    classes: tuple[str, ...] = ()  # their names; empty: their numbers
    mean: tuple[float, ...] = ()  # of the images that were normalised, one number a channel; empty if they were not
    std: tuple[float, ...] = ()  # as `mean`

    @property
    def sequence_shape(self) -> tuple[int, int]:
        """`(T, F)`: an image is read row by row, `H` steps of `C·W` features."""
        if self.kind == "sequence":
            steps, features = self.input_shape
            return steps, features
        channels, height, width = self.input_shape
        return height, channels * width
