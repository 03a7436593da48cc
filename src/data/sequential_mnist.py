"""MNIST as a sequence of rows or of pixels, optionally with the pixels in a fixed random order."""

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from .datamodule import Split
from .mnist import MNIST
from .spec import DataSpec

PERMUTATION_SEED = 92_916  # the same permutation in all runs, so that results can be compared


class SequentialMNIST(MNIST):
    """Sequential and permuted MNIST (Le, Jaitly & Hinton 2015).

    Args:
        steps: `rows` makes sequences `(28, 28)`, a row of pixels a step; `pixels` makes `(784, 1)`.
        permute: whether pixels are in a fixed random order, in which neighbours are far apart.
        **kwargs: as MNIST.
    """

    kind = "sequence"

    def __init__(self, steps: Literal["rows", "pixels"] = "rows", permute: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.steps = steps
        self.permute = permute

    @property
    @override
    def spec(self) -> DataSpec:
        """Sequences `(28, 28)` or `(784, 1)` with one class each."""
        shape = (28, 28) if self.steps == "rows" else (784, 1)
        return DataSpec(kind="sequence", input_shape=shape, target="class", num_outputs=10)

    @property
    @override
    def name(self) -> str:
        """`sequential-mnist-rows`, `sequential-mnist-pixels-permuted`, or the like with `-of-rendered-digits`."""
        suffix = "" if super().name == self.torchvision_name else "-of-rendered-digits"
        return f"sequential-mnist-{self.steps}{'-permuted' if self.permute else ''}{suffix}"

    @override
    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return `x: (N, T, F)` float32, normalised, and `y: (N,)` int64."""
        images, labels = super().load(split)
        pixels = images.flatten(start_dim=1)  # (N, 784)
        if self.permute:
            order = torch.randperm(784, generator=torch.Generator().manual_seed(PERMUTATION_SEED))
            pixels = pixels[:, order]
        return pixels.view(-1, *self.spec.input_shape), labels
