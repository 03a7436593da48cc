"""Augment: whole batches of images, shifted, rotated, cropped and flipped at random on the device that trains.

The random numbers of a sample depend on (seed, epoch, its position in the epoch's order) alone, so that a resumed run,
and any number of workers or ranks, sees the same images. They are drawn on the host, thousands of samples at a time, and
the device never waits for them.
"""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from ..options.types import NonNegativeInt, Range
from .order import epoch_seed

_BLOCK = 4_096  # samples whose numbers are drawn at once
_NUMBERS = 6  # of a sample: two of the shift, one of the rotation, two of the crop, one of the flip
_STREAM = 7  # keeps these numbers apart from those of the order, which have the same seed


class Augment:
    """Random changes of images `(B, C, H, W)`; by default none. What lies outside of an image repeats its edge.

    Args:
        shift: up to so many pixels in each direction, whole ones.
        rotation: up to so many degrees in each direction.
        crop: a window at a random place, so many pixels smaller in height and width, stretched to the image's size.
        flip: left and right exchanged, in half of the images.
    """

    def __init__(
        self,
        shift: NonNegativeInt = 0,
        rotation: Annotated[float, Range(0, 180)] = 0.0,
        crop: NonNegativeInt = 0,
        flip: bool = False,
    ):
        self.shift = shift
        self.rotation = rotation
        self.crop = crop
        self.flip = flip
        self._drawn: tuple[tuple[int, int, int], Tensor] | None = None  # the last block

    @property
    def is_on(self) -> bool:
        """Whether it changes anything."""
        return bool(self.shift or self.rotation or self.crop or self.flip)

    def numbers(self, seed: int, epoch: int, first: int, count: int) -> Tensor:
        """The random numbers `(count, 6)` in [0, 1) of samples by their positions in an epoch, from `first` on."""
        last = first + count
        blocks = [self._block(seed, epoch, block) for block in range(first // _BLOCK, -(-last // _BLOCK))]
        start = first // _BLOCK * _BLOCK
        return torch.cat(blocks)[first - start : last - start]

    def maps(self, numbers: Tensor, height: int, width: int) -> Tensor:
        """For `numbers: (B, 6)` the affine maps `(B, 2, 3)` from places in the new image to places in the old one.

        Coordinates are those of `torch.nn.functional.affine_grid`: −1 and 1 are the outer edges.
        """
        right, down = ((numbers[:, :2] * (2 * self.shift + 1)).floor() - self.shift).unbind(1)
        angle = (2 * numbers[:, 2] - 1) * math.radians(self.rotation)
        crop = self.crop
        left, top = ((numbers[:, 3:5] * (crop + 1)).floor() - crop / 2).unbind(1)
        flip = 1 - 2 * ((numbers[:, 5] < 0.5) & self.flip).to(numbers.dtype)
        across, along = (width - crop) / width, (height - crop) / height
        cos, sin = angle.cos(), angle.sin()
        x = [cos * across * flip, -sin * along * height / width, (left - right) * 2 / width]
        y = [sin * across * width / height * flip, cos * along, (top - down) * 2 / height]
        return torch.stack([torch.stack(x, 1), torch.stack(y, 1)], 1)

    def maps_of(self, x: Tensor, seed: int, epoch: int, first: int) -> Tensor:
        """The affine maps of images by their positions in an epoch, from `first` on; on their device."""
        maps = self.maps(self.numbers(seed, epoch, first, len(x)), x.shape[2], x.shape[3])
        if x.device.type == "cuda":
            maps = maps.pin_memory()
        return maps.to(x.device, non_blocking=True)

    def _block(self, seed: int, epoch: int, block: int) -> Tensor:
        key = (seed, epoch, block)
        if self._drawn is None or self._drawn[0] != key:
            generator = torch.Generator().manual_seed(epoch_seed(*key, _STREAM))
            self._drawn = (key, torch.rand(_BLOCK, _NUMBERS, generator=generator))
        return self._drawn[1]


def moved(x: Tensor, maps: Tensor) -> Tensor:
    """Images `(B, C, H, W)` or `(B, H, W)` under affine maps `(B, 2, 3)`; the same type, computed in float32.

    They are interpolated linearly; int64 and bool, which are classes and masks, take the nearest pixel.
    """
    if x.dim() == 3:
        return moved(x[:, None], maps)[:, 0]
    mode = "nearest" if x.dtype in (torch.int64, torch.bool) else "bilinear"
    values = x if x.dtype == torch.float64 else x.float()  # half precision has no place for a fraction of a pixel
    grid = F.affine_grid(maps.to(values.dtype), list(x.shape), align_corners=False)
    for axis, pixels in enumerate((x.shape[3], x.shape[2])):  # grid_sample's own "border" is not on every device
        grid[..., axis].clamp_(1 / pixels - 1, 1 - 1 / pixels)
    found = F.grid_sample(values, grid, mode=mode, padding_mode="zeros", align_corners=False)
    return (found if x.dtype.is_floating_point else found.round()).to(x.dtype)
