"""SimpleCNN: two convolutions and two linear layers.

Shapes: B images in a batch, C channels, H height, W width.
"""

from typing import Literal

from torch import Tensor, nn

from ..data.spec import DataSpec
from ..errors import UserError
from ..options.types import Fraction, PositiveInt


class SimpleCNN(nn.Module):
    """conv → max-pool → ReLU, twice; then linear → ReLU → linear. Any channels, any image of at least 4×4.

    On 28×28×1 with 10 classes: 421,642 parameters. The maximum of ReLUs is the ReLU of the maximum, which takes a quarter of
    the work.

    Args:
        spec: of image data; gives `(C, H, W)` and the number of classes.
        channels: of the first and the second convolution.
        hidden_size: width of the linear layer before the last.
        kernel_size: of both convolutions, an odd number of pixels; images are padded with zeros to keep their size.
        norm: `batch` normalizes what each convolution computes, after the pooling (Ioffe & Szegedy 2015); null does not.
        dropout: the fraction of the features that is left out before the linear layers, in training.
    """

    accepts = ("image",)

    def __init__(
        self,
        spec: DataSpec,
        channels: list[PositiveInt] | tuple[PositiveInt, ...] = (32, 64),
        hidden_size: PositiveInt = 128,
        kernel_size: PositiveInt = 3,
        norm: Literal["batch"] | None = None,
        dropout: Fraction = 0.0,
    ):
        super().__init__()
        in_channels, height, width = spec.input_shape
        if len(channels) != 2:
            raise UserError(f"model.channels: got {list(channels)}, takes two whole numbers, one a convolution")
        if not kernel_size % 2:
            raise UserError(f"model.kernel_size: got {kernel_size}, takes an odd number")
        first, second = channels

        def convolution(inputs: int, outputs: int) -> list[nn.Module]:  # (B, inputs, H, W) -> (B, outputs, H/2, W/2)
            layer = nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2, bias=norm is None)
            return [layer, nn.MaxPool2d(2), *([] if norm is None else [nn.BatchNorm2d(outputs)]), nn.ReLU()]

        self.features = nn.Sequential(*convolution(in_channels, first), *convolution(first, second))
        self.classifier = nn.Sequential(
            nn.Flatten(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Linear(second * (height // 4) * (width // 4), hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, spec.num_outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images `x: (B, C, H, W)` to class scores `(B, num_outputs)`."""
        return self.classifier(self.features(x))
