"""Copy memory: repeat ten symbols after a delay."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from ..options.types import PositiveInt
from .datamodule import GeneratedDataModule, Split
from .spec import DataSpec

SYMBOLS = 8  # classes 1 to 8; class 0 is the blank
LENGTH = 10  # symbols to remember
GO = SYMBOLS + 1  # the input that asks for the answer


class CopyMemory(GeneratedDataModule):
    """Hochreiter & Schmidhuber (1997) in the form of Arjovsky, Shah & Bengio (2016).

    The input is 10 symbols, `delay − 1` blanks, one "go" and 10 blanks. The target is blank up to the "go", and then
    the 10 symbols. The best loss without memory is 10·ln 8 / (delay + 20) per step. Accuracy counts only the ten
    answers.

    Args:
        delay: steps between the last symbol and the first answer.
        **kwargs: as GeneratedDataModule.
    """

    kind = "sequence"
    name = "copy-memory"

    def __init__(self, delay: PositiveInt = 10, **kwargs: Any):
        super().__init__(**kwargs)
        self.delay = delay

    @property
    @override
    def spec(self) -> DataSpec:
        """Sequences of `delay + 20` steps of 10 one-hot features, with a class (blank or one of 8) for each step."""
        return DataSpec("sequence", (self.delay + 2 * LENGTH, GO + 1), "class_per_step", SYMBOLS + 1, blank_class=0)

    @override
    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return `x: (N, T, 10)` float32 one-hot and `y: (N, T)` int64."""
        size, steps = self.sizes[split], self.delay + 2 * LENGTH
        symbols = torch.randint(1, SYMBOLS + 1, (size, LENGTH), generator=self.generator(split))
        inputs = torch.zeros(size, steps, GO + 1)  # F.one_hot takes 8 bytes a number: gigabytes for a long delay
        inputs[:, :, 0] = 1
        inputs[:, :LENGTH] = F.one_hot(symbols, GO + 1).float()
        inputs[:, LENGTH + self.delay - 1, 0] = 0
        inputs[:, LENGTH + self.delay - 1, GO] = 1
        targets = torch.zeros(size, steps, dtype=torch.long)
        targets[:, -LENGTH:] = symbols
        return inputs, targets
