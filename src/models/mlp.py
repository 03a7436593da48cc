"""MLP: a fully connected network that reads an image as one vector.

Shapes: B images in a batch, C channels, H height, W width.
"""

from itertools import pairwise

from torch import Tensor, nn

from ..data.spec import DataSpec
from ..options.types import PositiveInt


class MLP(nn.Module):
    """linear → ReLU for each hidden width, then a linear layer to the classes.

    Args:
        spec: the spec of image data, whose shape is flattened: 784 inputs for MNIST.
        hidden_sizes: the widths of the hidden layers, first to last; an empty list gives a linear classifier.
    """

    accepts = ("image",)

    def __init__(self, spec: DataSpec, hidden_sizes: list[PositiveInt] | tuple[PositiveInt, ...] = (512, 256)):
        super().__init__()
        channels, height, width = spec.input_shape
        sizes = [channels * height * width, *hidden_sizes]
        layers = [layer for m, n in pairwise(sizes) for layer in (nn.Linear(m, n), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], spec.num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores `(B, num_outputs)` for images `x: (B, C, H, W)`."""
        return self.layers(x)
