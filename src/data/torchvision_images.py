"""Image datasets of torchvision, with verified files.

Files that exist are verified before the first step and never replaced. Missing files are downloaded to a temporary
folder, verified, and moved into place under a lock, so that several jobs can start on one empty folder.
"""

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torchvision.datasets.utils import check_integrity
from typing_extensions import override

from .. import files
from ..errors import UserError, in_one_line, warn
from ..options.types import PositiveInt, Purpose
from .datamodule import Split, TensorDataModule
from .digits import DIGIT_SHAPE, cached_digits
from .spec import DataSpec

DOWNLOAD_TIMEOUT_S = 15
STAND_IN_SIZES = {"train": 60_000, "test": 10_000}  # of the rendered digits that replace a missing dataset


class TorchvisionImages(TensorDataModule):
    """A torchvision image dataset as normalised float tensors `(N, C, H, W)`.

    A subclass sets torchvision's class, the files that it reads, the shape and statistics of its images, and the number
    of classes if it is not ten.

    Args:
        root: the folder with the files, in torchvision's layout.
        num_val: the number of training images kept for validation, chosen by the seed.
        num_train: the number of remaining images that are trained on, chosen by the seed; None for all.
        num_test: the number of test images, from the first one on; None for all.
        offline: what to do when files are missing and cannot be downloaded: `digits` trains on rendered digits and
            records them as such, if the dataset's images have the shape of digits; `error` refuses.
        **kwargs: as TensorDataModule.

    Raises:
        UserError: from `check` and `prepare_data`, for a file that is not the official one; from `prepare_data` and
            `setup`, for missing files if rendered digits do not replace them.
    """

    kind = "image"
    torchvision_name: ClassVar[str]
    source: ClassVar[Any]  # torchvision's dataset class
    files: ClassVar[dict[str, str | None]]  # path below root → md5; None if the md5 is not known
    image_shape: ClassVar[tuple[int, int, int]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    num_classes: ClassVar[int] = 10
    classes: ClassVar[tuple[str, ...]] = ()  # the names of the classes, if torchvision's class has none

    def __init__(
        self,
        root: Annotated[str, Purpose.READ_FROM] = "data",
        num_val: PositiveInt = 5_000,
        num_train: PositiveInt | None = None,
        num_test: PositiveInt | None = None,
        offline: Annotated[Literal["digits", "error"], Purpose.READ_FROM] = "error",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.root = Path(root)
        self.num_val = num_val
        self.num_train = num_train
        self.num_test = num_test
        self.offline = offline
        # Set by the first call of prepare_data or load: files that appear later must not change the data of a running
        # training.
        self._is_official: bool | None = None

    @property
    @override
    def spec(self) -> DataSpec:
        classes = self.classes or tuple(getattr(self.source, "classes", ()))
        if self._is_official is False:  # for example, rendered digits are no clothes
            classes = ()
        return DataSpec(
            "image", self.image_shape, "class", self.num_classes, classes=classes, mean=self.mean, std=self.std
        )

    @property
    def name(self) -> str:  # pyrefly: ignore[bad-override]  # Lightning declares an attribute
        """The dataset's name, or `rendered-digits` if they replace it."""
        is_official = self._is_complete() if self._is_official is None else self._is_official
        return self.torchvision_name if is_official else "rendered-digits"

    @override
    def check(self) -> None:
        self._verify(self.root, allow_missing=True)

    @override
    def prepare_data(self) -> None:
        """Download missing files at the first call. Lightning calls this in one process of each node."""
        if self._is_official is None and not self._is_complete():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"data.root: {self.root} cannot be created: {error.strerror}") from error
            try:
                self._download()
            except Exception as error:  # noqa: BLE001 - any failure: refused, unknown host, wrong checksum
                message = self._missing_message(f"could not be downloaded ({in_one_line(error, 200)})")
                warn(
                    f"NOT {self.torchvision_name.upper()}: this run trains on digits rendered on this machine, and is "
                    f"recorded as 'rendered-digits'. {message}, or set data.offline=error to refuse instead."
                )
        self._is_official = self._is_complete() if self._is_official is None else self._is_official

    @override
    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return `x: (N, C, H, W)` float32, normalised, and `y: (N,)` int64."""
        images, labels = self._read_images(train=split != "test")
        indices = self._split_indices(split, len(images))
        images, labels = images[indices], labels[indices]
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std), labels

    def _split_indices(self, split: Split, num_images: int) -> Tensor:
        """Return the indices of a split's images among the `num_images` of its file."""
        if split == "test":
            return torch.arange(_check_count("num_test", self.num_test, num_images, "test images"))
        if self.num_val >= num_images:
            raise UserError(f"data.num_val: got {self.num_val}, takes fewer than the {num_images} training images")
        order = torch.randperm(num_images, generator=torch.Generator().manual_seed(self.seed))
        val, train = order[: self.num_val], order[self.num_val :]
        kind = f"training images beside {self.num_val} of data.num_val"
        return val if split == "val" else train[: _check_count("num_train", self.num_train, len(train), kind)]

    def _read_images(self, train: bool) -> tuple[Tensor, Tensor]:
        """Return images `(N, C, H, W)` uint8 and labels `(N,)` int64 of the official files, or rendered digits."""
        if self._is_official is None:
            self._is_official = self._is_complete()
        if not self._is_official:
            self._missing_message("prepare_data() has not downloaded it")
            split: Split = "train" if train else "test"
            return cached_digits(self.root, STAND_IN_SIZES[split], self.split_seed(split))
        try:
            # A subclass of this name that ignores `processed/`, which an old version may have left beside the files.
            source = type(self.source.__name__, (self.source,), {"_check_legacy_exist": lambda dataset: False})
            dataset: Any = source(str(self.root), train=train)
        except Exception as error:  # any failure of a parser on a damaged file
            raise UserError(
                f"data.root: {self.torchvision_name} in {self.root} cannot be read ({in_one_line(error, 200)}); "
                "delete it and run again"
            ) from error
        images, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets).long()
        images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
        return images, labels

    def _missing_message(self, reason: str) -> str:
        """Return the message for missing files; raise it as a UserError if digits may not replace them."""
        message = f"{self.torchvision_name} is not in {self.root.resolve()} and {reason}; put its files there"
        can_replace = self.image_shape == DIGIT_SHAPE
        if self.offline == "error" or not can_replace:
            digits = ", or data.offline=digits to train on rendered digits instead" if can_replace else ""
            raise UserError(f"data.root: {message}, write data.root=<folder> where they are{digits}")
        return message

    def _is_complete(self) -> bool:
        return all(os.path.isfile(self.root / file) for file in self.files)

    def _download(self) -> None:
        with contextlib.ExitStack() as stack:
            prefix = f".{self.torchvision_name}-"
            try:
                stack.enter_context(files.lock(self.root / f".{self.torchvision_name}.lock", waits=True))
                for leftover in self.root.glob(f"{prefix}*"):  # from a download that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
            except OSError as error:  # the lock file belongs to another user
                problem = f"data.root: {self.root} cannot be locked ({error.strerror})"
                warn(f"{problem}: do not start a second process that downloads there")
            if self._is_complete():
                return  # another job has downloaded the files meanwhile
            with tempfile.TemporaryDirectory(prefix=prefix, dir=self.root) as folder:
                print(f"downloading {self.torchvision_name} to {self.root} …", flush=True)
                old_timeout = socket.getdefaulttimeout()
                socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)  # gives up a download that receives nothing
                try:
                    self.source(folder, download=True)
                finally:
                    socket.setdefaulttimeout(old_timeout)
                self._verify(Path(folder))
                for file in self.files:
                    if not (self.root / file).exists():
                        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
                        os.replace(Path(folder) / file, self.root / file)

    def _verify(self, root: Path, allow_missing: bool = False) -> None:
        """Raise UserError unless the files are the official ones; with `allow_missing` files may be missing."""
        for file, md5 in self.files.items():
            path, fault = root / file, ""
            try:
                if not (allow_missing and not os.path.exists(path)) and not check_integrity(path, md5):
                    fault = "is not the official file"
            except OSError as error:
                fault = f"cannot be read: {error.strerror}"
            if fault:
                raise UserError(
                    f"data.root: {path}: {fault}; delete it and run again to download it, or put the official file there"
                )


def _check_count(option: str, count: int | None, available: int, kind: str) -> int:
    """Return the number of samples that are used; UserError if `count` is more than `available`."""
    if count is not None and count > available:
        raise UserError(f"data.{option}: got {count}, takes at most the {available} {kind}")
    return count or available
