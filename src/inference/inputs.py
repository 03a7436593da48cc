"""Inputs for predictions from a user's own files: a folder of images, or the arrays of an `.npz` file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ..data.spec import DataSpec
from ..errors import UserError, in_one_line, printable

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
_MODES = {1: "L", 3: "RGB"}  # of Pillow, by the number of channels


@dataclass(frozen=True)
class Inputs(Dataset):
    """Samples with a name each; an item is `(x,)`, or `(x, length)` where sequences vary in length.

    Of several inputs, x is a dict of them.
    """

    names: Sequence[str]
    samples: Any  # by their numbers
    resized: str = ""  # what was done to samples of another size; empty for nothing

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def read_inputs(source: Path, spec: DataSpec) -> Inputs:
    """The samples of a file or folder, as a network for `spec` reads them.

    `source` is a folder with images at any depth, one image, or an `.npz` file with an array `x: (N, …)`, or one of each
    of several inputs by its name. Images are scaled to [0, 1] and normalised as the training data. Arrays of bytes are
    images from 0 to 255, as `(N, C, H, W)` or `(N, H, W, C)`; of others integers become int64, and floats float32.
    UserError if nothing is there, or a sample does not have the shape that the network reads.
    """
    refuse_input(source)
    if source.suffix == ".npz":
        return _of_arrays(source, spec)
    if spec.kind != "image" or len(spec.inputs) > 1:
        reads = f"{spec.kind} data" if spec.kind != "image" else "several inputs"
        arrays = "an array x" if len(spec.inputs) == 1 else f"the arrays {', '.join(spec.inputs)}"
        raise UserError(f"input: got '{source}', and the network reads {reads}: takes an .npz file with {arrays}")
    files = _images_below(source) if source.is_dir() else [source]
    if not files:
        raise UserError(f"input: no image below '{source}'; takes {', '.join(sorted(IMAGE_SUFFIXES))}")
    images = _Images(files, spec)
    names = [str(file.relative_to(source)) if source.is_dir() else file.name for file in files]
    height, width = spec.input_shape[1:]
    others = sum(_size_of(file) != (width, height) for file in files)
    resized = f"{others:,} of {len(files):,} images were resized to {height}×{width}" if others else ""
    return Inputs(names, images, resized)


def refuse_input(source: Path) -> None:
    """UserError for a file or folder that is not there."""
    if not os.path.exists(source):
        raise UserError(
            f"input: got '{source}', takes test, val, predict, a folder of images, an image or an .npz file"
        )


class _Images:
    """Image files, of which each is read when it is asked for."""

    def __init__(self, files: Sequence[Path], spec: DataSpec):
        self.files, self.spec = files, spec
        if spec.input_shape[0] not in _MODES:
            raise UserError(f"input: the network reads {spec.input_shape[0]} channels: takes an .npz file, not images")

    def __getitem__(self, index: int) -> tuple[Tensor]:
        channels, height, width = self.spec.input_shape
        file = self.files[index]
        try:
            with Image.open(file) as opened:
                image = opened.convert(_MODES[channels])
        except Exception as error:  # any failure of a decoder on a damaged file
            raise UserError(_unreadable(file, error)) from error
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(image).reshape(height, width, channels).copy())
        return (normalised(pixels.permute(2, 0, 1), self.spec),)


def normalised(pixels: Tensor, spec: DataSpec) -> Tensor:
    """Bytes `(…, C, H, W)` as the float inputs of a network."""
    x = pixels.float() / 255
    if not spec.mean:
        return x
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
    return (x - mean) / std


def _images_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def _size_of(file: Path) -> tuple[int, int]:
    """Width and height, from the header alone, of an image whose values are bytes: Pillow cuts others off at 255."""
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"its values are of mode {image.mode}, takes 8 bits a channel")
            return image.size
    except Exception as error:
        raise UserError(_unreadable(file, error)) from error


def _unreadable(file: Path, error: Exception) -> str:
    return printable(f"input: '{file}' cannot be read as an image: {in_one_line(error, 120)}")


def _of_arrays(source: Path, spec: DataSpec) -> Inputs:
    try:
        with np.load(source, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except Exception as error:  # any failure of a decoder on a damaged file
        raise UserError(f"input: '{source}' cannot be read: {in_one_line(error, 120)}") from error
    first, *others = spec.inputs if len(spec.inputs) > 1 else ("x",)
    if len(found) == 1 and not others:
        first = next(iter(found))
    missing = [name for name in (first, *others) if name not in found]
    if missing:
        raise UserError(f"input: '{source}' has no array {missing[0]}, but {', '.join(map(repr, found)) or 'nothing'}")
    tensor = _as_inputs(found[first], source, spec, first)
    named = {first: tensor} | {name: _numbers(found[name], source, name) for name in others}
    if wrong := [name for name, each in named.items() if len(each) != len(tensor)]:
        raise UserError(
            f"input: {wrong[0]} in '{source}' has {len(named[wrong[0]])} samples, and {first} {len(tensor)}"
        )
    samples = [{name: each[i] for name, each in named.items()} for i in range(len(tensor))] if others else tensor
    names = [str(i) for i in range(len(tensor))]
    if not spec.variable_length:
        return Inputs(names, [(sample,) for sample in samples])
    lengths = found.get("lengths", np.full(len(tensor), tensor.shape[1]))
    right = lengths.shape == (len(tensor),) and lengths.dtype.kind in "iu"
    if not right or lengths.min(initial=1) < 1 or lengths.max(initial=1) > tensor.shape[1]:
        raise UserError(f"input: lengths in '{source}' takes {len(tensor)} integers from 1 to {tensor.shape[1]}")
    return Inputs(names, list(zip(samples, torch.from_numpy(lengths.astype(np.int64)), strict=True)))


def _numbers(x: np.ndarray, source: Path, name: str) -> Tensor:
    """Numbers as they are: integers as int64, others as float32."""
    if x.dtype.kind not in "fiub" or not x.ndim:
        raise UserError(
            f"input: {name} in '{source}' has values of type {x.dtype}, takes numbers, one or more a sample"
        )
    return torch.from_numpy(x.astype({"f": np.float32, "b": np.bool_}.get(x.dtype.kind, np.int64)))


def _as_inputs(x: np.ndarray, source: Path, spec: DataSpec, name: str) -> Tensor:
    """`(N, *input_shape)`; a sequence may have fewer steps where lengths vary."""
    numbers = _numbers(x, source, name)
    if x.dtype == np.uint8 and spec.kind == "image":
        pixels = torch.from_numpy(x.copy())
        if pixels.dim() == 3:  # (N, H, W)
            pixels = pixels[:, None]
        if pixels.dim() == 4 and pixels.shape[1:] != spec.input_shape and pixels.shape[3] == spec.input_shape[0]:
            pixels = pixels.permute(0, 3, 1, 2)
        tensor = normalised(pixels, spec) if pixels.shape[1:] == spec.input_shape else pixels
    else:
        tensor = numbers
    shape = tuple(tensor.shape[1:])
    fits = shape == spec.input_shape
    if spec.variable_length and len(shape) == len(spec.input_shape):
        fits = shape[1:] == spec.input_shape[1:] and 0 < shape[0] <= spec.input_shape[0]
    if not fits or not len(tensor):
        raise UserError(
            f"input: {name} in '{source}' has the shape {x.shape}, takes (N, {', '.join(map(str, spec.input_shape))})"
        )
    return tensor
