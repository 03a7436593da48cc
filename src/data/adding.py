"""The adding problem: add two marked numbers of a long sequence."""

from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from ..options.types import Range
from .datamodule import GeneratedDataModule, Split
from .spec import DataSpec


class Adding(GeneratedDataModule):
    """Hochreiter & Schmidhuber (1997), with numbers from U(0, 1) as in Le, Jaitly & Hinton (2015).

    Channel 0 holds a number for each step. Channel 1 marks one step of the first half and one of the second. The target
    is the sum of the two marked numbers. Always answering 1 gives a mean squared error of 1/6; below 0.01 counts as
    solved.

    Args:
        sequence_length: the number of steps T.
        **kwargs: as GeneratedDataModule.
    """

    kind = "sequence"
    name = "adding"

    def __init__(self, sequence_length: Annotated[int, Range(2)] = 100, **kwargs: Any):
        super().__init__(**kwargs)
        self.sequence_length = sequence_length

    @property
    @override
    def spec(self) -> DataSpec:
        """Sequences `(T, 2)` with one value each."""
        return DataSpec(kind="sequence", input_shape=(self.sequence_length, 2), target="value", num_outputs=1)

    @override
    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return `x: (N, T, 2)` and `y: (N,)`, both float32."""
        size, steps = self.sizes[split], self.sequence_length
        generator = self.generator(split)
        numbers = torch.rand(size, steps, generator=generator)
        first_step = torch.randint(0, steps // 2, (size,), generator=generator)
        second_step = torch.randint(steps // 2, steps, (size,), generator=generator)
        rows = torch.arange(size)
        marks = torch.zeros(size, steps)
        marks[rows, first_step] = 1
        marks[rows, second_step] = 1
        return torch.stack([numbers, marks], dim=2), numbers[rows, first_step] + numbers[rows, second_step]
