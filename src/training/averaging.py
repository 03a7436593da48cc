"""WeightAveraging: an exponential moving average of the weights, also of a training of a few hundred updates."""

from functools import partial
from typing import Annotated

from lightning.pytorch.callbacks import WeightAveraging as LightningWeightAveraging
from torch import Tensor

from ..options.types import Fraction, Purpose


class WeightAveraging(LightningWeightAveraging):
    """Validates, keeps and tests an average of the weights and buffers. Update n makes

        average ← d · average + (1 - d) · weights,    d = min(decay, (1 + n) / (10 + n))

    With a constant decay of 0.999 the weights of the first update would still be two fifths of the average after 860 updates.

    Args:
        decay: the average spans the last 1 / (1 - decay) updates, or about the last tenth of all updates if this is less.
        device: the device of the average; by default that of the weights.
    """

    def __init__(self, decay: Fraction = 0.999, device: Annotated[str, Purpose.SPEED] | None = None):
        super().__init__(device, avg_fn=partial(_average, decay))


def _average(decay: float, average: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
    """Return the next average, in the shape of the weights; `updates` holds one number, which stays on the device."""
    d = ((1 + updates) / (10 + updates)).clamp(max=decay)
    return d * average + (1 - d) * weights
