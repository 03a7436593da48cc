"""Read inputs for predictions from a user's files: a folder of images, or the array of an `.npz` file."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ..data.spec import LENGTHS, DataSpec
from ..errors import UserError, in_one_line, printable

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
_PILLOW_MODES = {1: "L", 3: "RGB"}  # by the number of channels


def read_inputs(source: Path, spec: DataSpec, dtype: torch.dtype | None = None) -> tuple[Sequence[str], Dataset]:
    """Return the names and the samples of a file or folder, as a network with one input reads them.

    A sample is `(x,)`, or `(x, length)` if sequences vary in length.

    `source` is a folder with images at any depth, one image, or an `.npz` file with an array `x: (N, *input_shape)`.
    Images and uint8 arrays of images are scaled to [0, 1] and normalised like the training data, unless the network was
    trained on bytes (`dtype` is uint8). In other arrays, integers become int64 and floats float32. UserError if
    `source` does not exist or has no samples, or if a sample does not have the shape that the network reads.
    """
    refuse_input(source)
    if len(spec.inputs) > 1:
        raise UserError(
            f"input: got '{source}', and the network reads {', '.join(spec.inputs)}: takes test, val or predict"
        )
    if source.suffix == ".npz":
        return _read_array(source, spec, dtype)
    if spec.kind != "image":
        raise UserError(
            f"input: got '{source}', and the network reads {spec.kind} data: takes an .npz file with an array x"
        )
    files = [source]
    if source.is_dir():
        paths = sorted(source.rglob("*"))
        files = [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
        files = [path for path in files if not path.name.startswith("._")]  # metadata that macOS writes beside a file
    if not files:
        raise UserError(f"input: no image below '{source}'; takes {', '.join(sorted(IMAGE_SUFFIXES))}")
    names = [str(file.relative_to(source)) if source.is_dir() else file.name for file in files]
    return names, _Images(files, spec, dtype)


def refuse_input(source: Path) -> None:
    """Raise UserError if a file or folder does not exist."""
    if not os.path.exists(source):
        raise UserError(
            f"input: got '{source}', takes test, val, predict, a folder of images, an image or an .npz file"
        )


class _Images(Dataset):
    """Image files, each of which is read when it is indexed."""

    def __init__(self, files: Sequence[Path], spec: DataSpec, dtype: torch.dtype | None):
        self.files, self.spec, self.dtype = files, spec, dtype
        if spec.input_shape[0] not in _PILLOW_MODES:
            raise UserError(f"input: the network reads {spec.input_shape[0]} channels: takes an .npz file, not images")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        channels, height, width = self.spec.input_shape
        file = self.files[index]
        try:
            with Image.open(file) as stored:
                if stored.mode.startswith(("I", "F")):  # Pillow would clip the values at 255
                    raise ValueError(f"its values are of mode {stored.mode}, takes 8 bits a channel")
                image = stored.convert(_PILLOW_MODES[channels])
        except Exception as error:  # any failure of a decoder on a damaged file
            message = f"input: '{file}' cannot be read as an image: {in_one_line(error, 120)}"
            raise UserError(printable(message)) from error
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(image).reshape(height, width, channels).copy())
        return (_normalise(pixels.permute(2, 0, 1), self.spec, self.dtype),)


def _normalise(pixels: Tensor, spec: DataSpec, dtype: torch.dtype | None) -> Tensor:
    """Return bytes `(…, C, H, W)` as inputs of a network: normalised floats, unless it was trained on bytes."""
    if dtype == torch.uint8:
        return pixels
    x = pixels.float() / 255
    if not spec.mean:
        return x
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
    return (x - mean) / std


def _read_array(source: Path, spec: DataSpec, dtype: torch.dtype | None) -> tuple[Sequence[str], Dataset]:
    try:
        with np.load(source, allow_pickle=False) as arrays:
            fields = {name: arrays[name] for name in ("x", LENGTHS) if name in arrays}
    except Exception as error:  # any failure of a decoder on a damaged file
        raise UserError(f"input: '{source}' cannot be read: {in_one_line(error, 120)}") from error
    if "x" not in fields:
        raise UserError(f"input: '{source}' has no array x")
    x, shape = fields["x"], spec.input_shape
    if spec.variable_length and x.ndim > 1 and 0 < x.shape[1] < shape[0]:
        shape = (x.shape[1], *shape[1:])  # a sequence may have fewer steps
    if x.dtype.kind not in "fiu" or x.shape[1:] != shape or not len(x):
        expected = f"(N, {', '.join(map(str, spec.input_shape))})"
        raise UserError(f"input: x in '{source}' has values {x.dtype} of shape {x.shape}, takes numbers {expected}")
    if x.dtype == np.uint8 and spec.kind == "image":
        tensor = _normalise(torch.from_numpy(x), spec, dtype)
    else:
        tensor = torch.from_numpy(x.astype(np.float32 if x.dtype.kind == "f" else np.int64))
    names = [str(i) for i in range(len(x))]
    if not spec.variable_length:
        return names, TensorDataset(tensor)
    lengths = fields.get(LENGTHS, np.full(len(x), x.shape[1]))
    are_integers = lengths.shape == (len(x),) and lengths.dtype.kind in "iu"
    if not are_integers or lengths.min() < 1 or lengths.max() > x.shape[1]:
        raise UserError(f"input: lengths in '{source}' takes {len(x)} integers from 1 to {x.shape[1]}")
    return names, TensorDataset(tensor, torch.from_numpy(lengths.astype(np.int64)))
