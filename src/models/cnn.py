"""SimpleCNN: two convolutions and two linear layers.

Shapes: B images in a batch, C channels, H height, W width.
"""

from torch import Tensor, nn

from ..data.spec import DataSpec
from ..errors import UserError
from ..options.types import PositiveInt


class SimpleCNN(nn.Module):
    """conv 3×3 → ReLU → max-pool, twice; then linear → ReLU → linear. Any channels, any image of at least 4×4.

    On 28×28×1 with 10 classes: 421,642 parameters.

    Args:
        spec: of image data; gives `(C, H, W)` and the number of classes.
        channels: of the first and the second convolution.
        hidden_size: width of the linear layer before the last.
    """

    accepts = ("image",)

    def __init__(
        self,
        spec: DataSpec,
        channels: list[PositiveInt] | tuple[PositiveInt, ...] = (32, 64),
        hidden_size: PositiveInt = 128,
    ):
        super().__init__()
        in_channels, height, width = spec.input_shape
        if len(channels) != 2:
            raise UserError(f"model.channels: got {list(channels)}, takes two whole numbers, one a convolution")
        first, second = channels
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, first, kernel_size=3, padding=1),  # (B, C, H, W) -> (B, 32, H, W)
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 32, H/2, W/2)
            nn.Conv2d(first, second, kernel_size=3, padding=1),  # (B, 64, H/2, W/2)
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 64, H/4, W/4)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(second * (height // 4) * (width // 4), hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, spec.num_outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images `x: (B, C, H, W)` to class scores `(B, num_outputs)`."""
        return self.classifier(self.features(x))
