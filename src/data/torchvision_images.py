"""Datasets whose official files torchvision knows: found, verified, or downloaded once, whoever asks first.

Files that are there are verified before the first step and never replaced. Missing ones are downloaded to a folder of
their own, verified, and moved into place under a lock: several jobs that start on one empty folder end with one copy.
"""

import hashlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torchvision.datasets import VisionDataset

from ..errors import UserError, warn
from ..files import wait_for_lock
from ..options.types import PositiveInt, Purpose
from .datamodule import Split, TensorDataModule
from .digits import cached_digits
from .spec import DataSpec

DOWNLOAD_TIMEOUT_S = 15
STAND_IN_SIZES = {"train": 60_000, "test": 10_000}


class Expected(NamedTuple):
    """What is known of an official file: its size in bytes and its md5, each None where it is not known."""

    size: int | None
    md5: str | None


class TorchvisionImages(TensorDataModule):
    """A torchvision image dataset as normalised float tensors `(N, C, H, W)`.

    A subclass names torchvision's class, the files it must have, and the shape and statistics of its images.

    Args:
        root: the folder that torchvision's layout is looked for and stored in.
        num_val: how many training images are kept for validation, chosen by the seed.
        offline: what to do when the files are missing and cannot be downloaded: `digits` trains on rendered digits
            and says so everywhere; `error` refuses.
        **kwargs: as TensorDataModule.

    Raises:
        UserError: from `check` and `prepare_data`, naming the file, what it is and what it should be.
    """

    kind = "image"
    torchvision_name: ClassVar[str]
    source: ClassVar[type[VisionDataset]]
    files: ClassVar[dict[str, Expected]]  # by path below root
    image_shape: ClassVar[tuple[int, int, int]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        root: Annotated[str, Purpose.READ_FROM] = "data",
        num_val: PositiveInt = 5_000,
        offline: Annotated[Literal["digits", "error"], Purpose.READ_FROM] = "error",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.root = Path(root)
        self.num_val = num_val
        self.offline = offline
        # Whether the official files are what is loaded. Decided once: files that appear later, or a second try to
        # download them when Lightning prepares the test set, must not change what a run has already trained on.
        self._official: bool | None = None

    @property
    def spec(self) -> DataSpec:
        """Ten classes of images."""
        return DataSpec(
            kind="image",
            input_shape=self.image_shape,
            target="class",
            num_outputs=10,
            classes=tuple(self.source.classes) if hasattr(self.source, "classes") else (),
            mean=self.mean,
            std=self.std,
        )

    @property
    def name(self) -> str:
        """The dataset's name, or `rendered-digits` where they stand in for it."""
        official = self._complete() if self._official is None else self._official
        return self.torchvision_name if official else "rendered-digits"

    def check(self) -> None:
        """Verify the files that are there; where some are missing, see that they could be stored."""
        for file, expected in self.files.items():
            if (self.root / file).exists():
                verify(self.root / file, expected, self.files)
        if not self._complete():
            check_writable(self.root)

    def prepare_data(self) -> None:
        """Download what is missing, at the first call. Lightning calls this in one process a machine."""
        if self._official is None:
            if not self._complete():
                self._download_or_say_so()
            self._official = self._complete()

    def _download_or_say_so(self) -> None:
        check_writable(self.root)
        try:
            self._download()
        except Exception as error:  # whatever a network can do: refused, no such host, a wrong checksum
            reason = f"{type(error).__name__}: {error}"
            if self.offline == "error":
                raise UserError(
                    f"data.root: {self.torchvision_name} is not in {self.root.resolve()} and could not be downloaded "
                    f"({' '.join(reason.split())[:200]}); put its files there"
                ) from error
            warn_of_stand_in(self.torchvision_name, self.root, reason)

    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """`x: (N, C, H, W)` float32, normalised; `y: (N,)` int64."""
        images, labels = self._raw(train=split != "test")
        if split != "test":
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.randperm(len(images), generator=generator)
            if self.num_val >= len(images):
                raise UserError(f"data.num_val: got {self.num_val}, takes fewer than the {len(images)} training images")
            order = order[: self.num_val] if split == "val" else order[self.num_val :]
            images, labels = images[order], labels[order]
        mean = torch.tensor(self.mean).view(1, -1, 1, 1)
        std = torch.tensor(self.std).view(1, -1, 1, 1)
        return images.float().div_(255).sub_(mean).div_(std), labels

    def _raw(self, train: bool) -> tuple[Tensor, Tensor]:
        """Images `(N, C, H, W)` uint8 and labels `(N,)` int64, the official ones or their stand-in."""
        if self._official is None:
            self._official = self._complete()
        if not self._official:
            split: Split = "train" if train else "test"
            return cached_digits(self.root, STAND_IN_SIZES[split], self.split_seed(split))
        try:
            dataset = self.source(str(self.root), train=train)
        except Exception as error:  # whatever a parser meets in a file that is not what its name says
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"data.root: {self.torchvision_name} in {self.root} cannot be read ({' '.join(reason.split())[:200]}); "
                "delete it and run again"
            ) from error
        images, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets).long()
        images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
        if len(images) != len(labels) or labels.min() < 0 or labels.max() >= self.spec.num_outputs:
            raise UserError(
                f"data.root: {self.torchvision_name} in {self.root} has {len(images)} images and {len(labels)} labels from "
                f"{int(labels.min())} to {int(labels.max())}, expected as many and from 0 to 9; delete it and run again"
            )
        return images, labels

    def _complete(self) -> bool:
        return all((self.root / file).is_file() for file in self.files)

    def _download(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(self.root / f".{self.torchvision_name}.lock"):
            if self._complete():
                return  # another job was faster
            with tempfile.TemporaryDirectory(prefix=".download-", dir=self.root) as folder, _socket_timeout():
                print(f"downloading {self.torchvision_name} to {self.root} …", flush=True)
                self.source(folder, download=True)
                for file, expected in self.files.items():
                    verify(Path(folder) / file, expected, self.files)
                for file in self.files:
                    if not (self.root / file).exists():
                        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
                        os.replace(Path(folder) / file, self.root / file)


def verify(path: Path, expected: Expected, files: dict[str, Expected]) -> None:
    """Raise UserError unless the file is the official one; say which other one it is if it is."""
    repair = "delete it and run again to download it, or put the official file there"
    size = path.stat().st_size
    if expected.size is not None and size != expected.size:
        others = [Path(f).name for f, e in files.items() if e.size == size]
        what = f"is as long as {others[0]}, " if others else "is truncated, " if size < expected.size else ""
        raise UserError(f"data.root: {path}: {what}has {size:,} bytes, expected {expected.size:,}; {repair}")
    if expected.md5 is None:
        return
    try:
        with path.open("rb") as stream:
            md5 = hashlib.file_digest(stream, "md5").hexdigest()
    except OSError as error:
        raise UserError(f"data.root: {path}: cannot be read: {error.strerror}; {repair}") from error
    if md5 != expected.md5:
        others = [Path(f).name for f, e in files.items() if e.md5 == md5]
        what = f"holds the content of {others[0]}" if others else "is corrupted"
        raise UserError(
            f"data.root: {path}: {what}, {size:,} bytes with md5 {md5}, expected {expected.md5}"
            f"{f' in {expected.size:,} bytes' if expected.size else ''}; {repair}"
        )


def check_writable(root: Path) -> None:
    """Raise UserError if files could not be stored below root; creates nothing."""
    folder = root.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"data.root: got '{root}', which cannot be written to ({folder} is not a writable folder)")


def warn_of_stand_in(name: str, root: Path, reason: str) -> None:
    """Say, so that nobody can miss it, that the run does not train on what was asked for."""
    warn(
        f"NOT {name.upper()}: this run trains on digits rendered on this machine, and is recorded as 'rendered-digits'. "
        f"{name} is not in {root.resolve()} and could not be downloaded ({' '.join(reason.split())[:160]}); put its "
        "files there, or set data.offline=error to refuse instead."
    )


class _socket_timeout:
    """A download that hears nothing for a while is given up, instead of hanging."""

    def __enter__(self) -> None:
        self.before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        socket.setdefaulttimeout(self.before)
