"""The model: a plain torch module. Shapes and classes come from the data, options from conf/model/mynet.yaml."""

from torch import Tensor, nn

from batchscope.data import DataSpec
from batchscope.options.types import PositiveInt


class Net(nn.Module):
    """Two convolutions over time, averaged.

    Args:
        spec: what the dataset says of itself.
        channels: of the convolutions. Its type is checked before anything is imported.
        kernel_size: steps that a convolution sees.
    """

    accepts = ("sequence",)  # what the model reads: image, sequence, or both

    def __init__(self, spec: DataSpec, channels: PositiveInt = 16, kernel_size: PositiveInt = 5):
        super().__init__()
        _, features = spec.sequence_shape
        self.layers = nn.Sequential(
            nn.Conv1d(features, channels, kernel_size, padding="same"),
            nn.ReLU(),
            nn.Conv1d(channels, channels, kernel_size, padding="same"),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(channels, spec.num_outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x: (B, T, F)` → a number for each class, `(B, C)`."""
        return self.layers(x.transpose(1, 2))
