"""Digits rendered on this machine: any number of them, in MNIST's shape, without a download.

Each digit is drawn in one of matplotlib's fonts, randomly stretched, rotated, sheared, bent, thickened or thinned, with
noise. Digits are rendered in batches of tensors: 60,000 take seconds.
"""

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import pil_to_tensor
from typing_extensions import override

from ..files import atomic_write
from ..options.types import PositiveInt, Purpose
from .datamodule import GeneratedDataModule, Split
from .spec import DataSpec

VERSION = 2  # of the rendering; part of the cache's file name
_FONTS = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmb10", "cmr10", "cmss10", "cmti10", "cmtt10")
DIGIT_SHAPE = (1, 28, 28)
_SIDE = 64  # height and width of an undistorted digit, in pixels
_CHUNK_SIZE = 4_096  # digits that are rendered at once


class Digits(GeneratedDataModule):
    """Rendered digits in ten classes, `(1, 28, 28)`.

    Args:
        root: the folder whose subfolder `digits/` caches the images, if it is writable.
        num_train, num_val, num_test, **kwargs: as GeneratedDataModule.
    """

    kind = "image"
    name = "rendered-digits"

    def __init__(
        self,
        root: Annotated[str, Purpose.READ_FROM] = "data",
        num_train: PositiveInt = 55_000,
        num_val: PositiveInt = 5_000,
        num_test: PositiveInt = 10_000,
        **kwargs: Any,
    ):
        super().__init__(num_train, num_val, num_test, **kwargs)
        self.root = Path(root)

    @property
    @override
    def spec(self) -> DataSpec:
        """Images `(1, 28, 28)` of ten classes, with pixels in [−1, 1]."""
        return DataSpec("image", DIGIT_SHAPE, "class", 10, classes=tuple("0123456789"), mean=(0.5,), std=(0.5,))

    @override
    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return `x: (N, 1, 28, 28)` float32 and `y: (N,)` int64."""
        images, labels = cached_digits(self.root, self.sizes[split], self.split_seed(split))
        return images.float().div_(127.5).sub_(1), labels


def cached_digits(root: Path, num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `render_digits`, cached in `root/digits`. Replace an unreadable file; skip an unwritable folder."""
    file = root / "digits" / f"v{VERSION}-{num}-{seed}.pt"
    if file.is_file():  # reading a pipe would block
        with suppress(Exception):  # the file may be truncated, or hold anything
            images, labels = torch.load(file, weights_only=True)
            layout = (images.shape, images.dtype, labels.shape, labels.dtype)
            if layout == ((num, *DIGIT_SHAPE), torch.uint8, (num,), torch.int64):
                return images, labels
    digits = render_digits(num, seed)
    with suppress(OSError, RuntimeError):  # torch reports a full disk as a RuntimeError
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as stream:
            torch.save(digits, stream)
    return digits


def render_digits(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images `(N, 1, 28, 28)` uint8 with background 0, and labels `(N,)` int64, determined by (num, seed)."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = _glyphs()  # (10, fonts, 64, 64)
    labels = torch.randint(0, 10, (num,), generator=generator)
    fonts = torch.randint(0, glyphs.shape[1], (num,), generator=generator)
    images = torch.empty(num, *DIGIT_SHAPE, dtype=torch.uint8)
    for start in range(0, num, _CHUNK_SIZE):
        chunk = slice(start, start + _CHUNK_SIZE)
        images[chunk] = _distort(glyphs[labels[chunk], fonts[chunk], None], generator)
    return images, labels


@cache
def _glyphs() -> Tensor:
    """Return each digit in each font, `(10, fonts, 64, 64)` in [0, 1], 40 pixels high and centred."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    files = [f for f in folder.glob("*.ttf") if f.stem.startswith(_FONTS) and not f.stem.endswith("Display")]
    files.sort(key=lambda file: file.name)  # paths have another order on Windows
    return torch.stack([torch.stack([_glyph(str(digit), file) for file in files]) for digit in range(10)])


def _glyph(text: str, font_file: Path) -> Tensor:
    font = ImageFont.truetype(str(font_file), 80)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(image).text((-left, -top), text, fill=255, font=font)
    width = max(1, round(image.width * 40 / image.height))
    canvas = Image.new("L", (_SIDE, _SIDE))
    canvas.paste(image.resize((width, 40), Image.Resampling.BILINEAR), ((_SIDE - width) // 2, (_SIDE - 40) // 2))
    return pil_to_tensor(canvas)[0].float() / 255


@cache
def _grid_basis() -> Tensor:
    """Return the basis of sampling grids, `(3 + 16, 56·56)`: x, y and 1, and a bump at each of 4×4 positions.

    One matrix product makes the grids of a batch, several times faster than `affine_grid` and a bicubic `interpolate`.
    """
    plane = F.affine_grid(torch.eye(2, 3)[None], [1, 1, 56, 56], align_corners=False)[0].permute(2, 0, 1)
    impulses = torch.eye(16).view(16, 1, 4, 4)
    bumps = F.interpolate(impulses, size=(56, 56), mode="bicubic", align_corners=True)[:, 0]
    return torch.cat([plane, torch.ones(1, 56, 56), bumps]).flatten(start_dim=1)


def _distort(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    """Distort glyphs `(B, 1, 64, 64)` in [0, 1] to images `(B, 1, 28, 28)` uint8."""
    batch = len(glyphs)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator) * (high - low) + low

    angle, shear = uniform(-0.3, 0.3), uniform(-0.35, 0.25)
    width, height = uniform(0.8, 1.35), uniform(0.85, 1.15)
    cos, sin = angle.cos(), angle.sin()
    # The grid maps an output position to the input position that is sampled: a factor above 1 shrinks the digit.
    rows = [cos * width, (shear - sin) * height, uniform(-0.12, 0.12), sin * width, cos * height, uniform(-0.12, 0.12)]
    bend = torch.randn(batch, 2, 16, generator=generator) * 0.06
    weights = torch.cat([torch.stack(rows, dim=1).view(batch, 2, 3), bend], dim=2)
    grid = (weights @ _grid_basis()).view(batch, 2, 56, 56).permute(0, 2, 3, 1)
    # Sample at twice the size and average, so that thin strokes do not break.
    image = F.avg_pool2d(F.grid_sample(glyphs, grid, align_corners=False), 2)
    threshold = uniform(0.1, 0.5, 1, 1, 1)  # of the blurred stroke: a low threshold thickens it
    softness = (2 * threshold).clamp_(max=0.35)  # of the stroke's edge; limited, so that the background stays black
    image = ((image - threshold) / softness + 0.5).clamp_(0, 1) * uniform(0.75, 1, 1, 1, 1)
    image += torch.randn(image.shape, generator=generator) * uniform(0, 0.08, 1, 1, 1)
    return image.clamp_(0, 1).mul_(255).round_().to(torch.uint8)
