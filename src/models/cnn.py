"""SimpleCNN: two convolutions and two linear layers.

Shapes: B images in a batch, C channels, H height, W width.
"""

from typing import Literal

from torch import Tensor, nn

from ..data.spec import DataSpec
from ..errors import UserError
from ..options.types import Fraction, PositiveInt


class SimpleCNN(nn.Module):
    """conv → max-pool → ReLU, twice; then linear → ReLU → linear. Takes any channels and any image of at least 4×4.

    On 28×28×1 with 10 classes: 421,642 parameters. Pooling stands before the ReLU: the result is the same, and the ReLU
    has a quarter of the work.

    Args:
        spec: the spec of image data, with `(C, H, W)` and the number of classes.
        channels: the output channels of the first and the second convolution.
        hidden_size: the width of the linear layer before the last.
        kernel_size: of both convolutions, an odd number of pixels; zero padding keeps the size of images.
        norm: `batch` normalizes the output of each convolution, after pooling (Ioffe & Szegedy 2015); null does not.
        dropout: the fraction of features that is dropped before the linear layers, in training.
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
        channels_1, channels_2 = channels

        def convolution(inputs: int, outputs: int) -> list[nn.Module]:  # (B, inputs, H, W) -> (B, outputs, H/2, W/2)
            layer = nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2, bias=norm is None)
            return [layer, nn.MaxPool2d(2), *([] if norm is None else [nn.BatchNorm2d(outputs)]), nn.ReLU()]

        self.features = nn.Sequential(*convolution(in_channels, channels_1), *convolution(channels_1, channels_2))
        if dropout:
            self.features.append(nn.Dropout(dropout))
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels_2 * (height // 4) * (width // 4), hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, spec.num_outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores `(B, num_outputs)` for images `x: (B, C, H, W)`."""
        return self.classifier(self.features(x))
