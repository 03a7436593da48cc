"""Augment: shift, rotate, crop and flip batches of images at random, on the device that trains.

The random numbers of a sample depend only on (seed, epoch, position in the epoch's order), so that a resumed run, and
any number of workers or ranks, sees the same images. They are drawn on the host, thousands of samples at a time, and
the device never waits for them.
"""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from ..options.types import NonNegativeInt, Range
from .order import epoch_seed

_BLOCK_SIZE = 4_096  # samples whose random numbers are drawn at once
_NUMBERS_PER_SAMPLE = 6  # two for the shift, one for the rotation, two for the crop, one for the flip
_SEED_STREAM = 7  # separates these random numbers from those of the order, which use the same seed


class Augment:
    """Random changes of images `(B, C, H, W)`; by default none. Pixels outside of an image repeat its edge.

    Args:
        shift: the largest shift in each direction, in pixels; shifts are whole numbers.
        rotation: the largest rotation in each direction, in degrees.
        crop: by how many pixels a random window is smaller than the image; it is stretched to the image's size.
        flip: whether half of the images are flipped left to right.
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
        self._last_block: tuple[tuple[int, int, int], Tensor] | None = None  # (seed, epoch, block), its numbers

    @property
    def is_on(self) -> bool:
        """Whether any option changes images."""
        return bool(self.shift or self.rotation or self.crop or self.flip)

    def random_numbers(self, seed: int, epoch: int, position: int, count: int) -> Tensor:
        """Return the random numbers `(count, 6)` in [0, 1) of the samples from `position` of an epoch on."""
        end = position + count
        blocks = [self._block(seed, epoch, block) for block in range(position // _BLOCK_SIZE, -(-end // _BLOCK_SIZE))]
        block_start = position // _BLOCK_SIZE * _BLOCK_SIZE
        return torch.cat(blocks)[position - block_start : end - block_start]

    def affine_maps(self, numbers: Tensor, height: int, width: int) -> Tensor:
        """Return for `numbers: (B, 6)` affine maps `(B, 2, 3)` from positions in the new image to the old one.

        Coordinates are those of `torch.nn.functional.affine_grid`: −1 and 1 are the outer edges.
        """
        shift_x, shift_y = ((numbers[:, :2] * (2 * self.shift + 1)).floor() - self.shift).unbind(1)
        angle = (2 * numbers[:, 2] - 1) * math.radians(self.rotation)
        crop = self.crop
        crop_x, crop_y = ((numbers[:, 3:5] * (crop + 1)).floor() - crop / 2).unbind(1)
        flip = 1 - 2 * ((numbers[:, 5] < 0.5) & self.flip).to(numbers.dtype)
        scale_x, scale_y = (width - crop) / width, (height - crop) / height
        cos, sin = angle.cos(), angle.sin()
        x = [cos * scale_x * flip, -sin * scale_y * height / width, (crop_x - shift_x) * 2 / width]
        y = [sin * scale_x * width / height * flip, cos * scale_y, (crop_y - shift_y) * 2 / height]
        return torch.stack([torch.stack(x, 1), torch.stack(y, 1)], 1)

    def draw_maps(self, x: Tensor, seed: int, epoch: int, position: int) -> Tensor:
        """Return the affine maps of the images from `position` of an epoch on, on the device of `x`."""
        maps = self.affine_maps(self.random_numbers(seed, epoch, position, len(x)), x.shape[2], x.shape[3])
        if x.device.type == "cuda":
            maps = maps.pin_memory()
        return maps.to(x.device, non_blocking=True)

    def _block(self, seed: int, epoch: int, block: int) -> Tensor:
        key = (seed, epoch, block)
        if self._last_block is None or self._last_block[0] != key:
            generator = torch.Generator().manual_seed(epoch_seed(*key, _SEED_STREAM))
            self._last_block = (key, torch.rand(_BLOCK_SIZE, _NUMBERS_PER_SAMPLE, generator=generator))
        return self._last_block[1]


def warp_images(x: Tensor, maps: Tensor) -> Tensor:
    """Apply affine maps `(B, 2, 3)` to images `(B, C, H, W)` or `(B, H, W)`; compute in float32 and keep the dtype.

    Images are interpolated linearly; int64 and bool, which are classes and masks, take the nearest pixel.
    """
    if x.dim() == 3:
        return warp_images(x[:, None], maps)[:, 0]
    mode = "nearest" if x.dtype in (torch.int64, torch.bool) else "bilinear"
    values = x if x.dtype == torch.float64 else x.float()  # half precision cannot represent fractions of a pixel
    grid = F.affine_grid(maps.to(values.dtype), list(x.shape), align_corners=False)
    for axis, pixels in enumerate((x.shape[3], x.shape[2])):  # some devices lack padding_mode="border"
        grid[..., axis].clamp_(1 / pixels - 1, 1 - 1 / pixels)
    warped = F.grid_sample(values, grid, mode=mode, padding_mode="zeros", align_corners=False)
    return (warped if x.dtype.is_floating_point else warped.round()).to(x.dtype)
