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

    A subclass names torchvision's class, the files it reads, the shape and statistics of its images, and its classes where they
    are not ten.

    Args:
        root: the folder of torchvision's layout.
        num_val: how many training images are kept for validation, chosen by the seed.
        num_train: how many of the others are trained on, chosen by the seed; None for all.
        num_test: how many test images are used, the first ones; None for all.
        offline: what to do when files are missing and cannot be downloaded: `digits` trains on rendered digits and
            records them as such, where its images have the shape of digits; `error` refuses.
        **kwargs: as TensorDataModule.

    Raises:
        UserError: from `check` and `prepare_data`, for a file that is not the official one; from `prepare_data` and `setup`, for
            missing files that no digits replace.
    """

    kind = "image"
    torchvision_name: ClassVar[str]
    source: ClassVar[Any]  # torchvision's dataset class
    files: ClassVar[dict[str, str | None]]  # path below root → md5; None where it is not known
    image_shape: ClassVar[tuple[int, int, int]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    num_classes: ClassVar[int] = 10
    classes: ClassVar[tuple[str, ...]] = ()  # their names, where torchvision's class has none

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
        # Whether the official files are used. The first call of prepare_data or load decides: files that appear later
        # must not change the data of a running training.
        self._official: bool | None = None

    @property
    @override
    def spec(self) -> DataSpec:
        classes = (
            () if self._official is False else self.classes or tuple(getattr(self.source, "classes", ()))
        )  # of clothes no digit
        return DataSpec(
            "image", self.image_shape, "class", self.num_classes, classes=classes, mean=self.mean, std=self.std
        )

    @property
    def name(self) -> str:  # pyrefly: ignore[bad-override]  # Lightning declares an attribute
        """The dataset's name, or `rendered-digits` if they replace it."""
        official = self._complete() if self._official is None else self._official
        return self.torchvision_name if official else "rendered-digits"

    @override
    def check(self) -> None:
        self._verify(self.root, missing=True)

    @override
    def prepare_data(self) -> None:
        """Download missing files at the first call. Lightning calls this in one process of each machine."""
        if self._official is None and not self._complete():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"data.root: {self.root} cannot be created: {error.strerror}") from error
            try:
                self._download()
            except Exception as error:  # noqa: BLE001 - any failure of a network: refused, unknown host, wrong checksum
                missing = self._missing(f"could not be downloaded ({in_one_line(error, 200)})")
                warn(
                    f"NOT {self.torchvision_name.upper()}: this run trains on digits rendered on this machine, and is "
                    f"recorded as 'rendered-digits'. {missing}, or set data.offline=error to refuse instead."
                )
        self._official = self._complete() if self._official is None else self._official

    @override
    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """`x: (N, C, H, W)` float32, normalised; `y: (N,)` int64."""
        images, labels = self._raw(train=split != "test")
        chosen = self._chosen(split, len(images))
        images, labels = images[chosen], labels[chosen]
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std), labels

    def _chosen(self, split: Split, stored: int) -> Tensor:
        """The indices of a split's images among the `stored` ones of its file."""
        if split == "test":
            return torch.arange(_fitting("num_test", self.num_test, stored, "test images"))
        if self.num_val >= stored:
            raise UserError(f"data.num_val: got {self.num_val}, takes fewer than the {stored} training images")
        order = torch.randperm(stored, generator=torch.Generator().manual_seed(self.seed))
        val, others = order[: self.num_val], order[self.num_val :]
        what = f"training images beside {self.num_val} of data.num_val"
        return val if split == "val" else others[: _fitting("num_train", self.num_train, len(others), what)]

    def _raw(self, train: bool) -> tuple[Tensor, Tensor]:
        """Images `(N, C, H, W)` uint8 and labels `(N,)` int64: the official ones, or rendered digits."""
        if self._official is None:
            self._official = self._complete()
        if not self._official:
            self._missing("prepare_data() has not downloaded it")
            split: Split = "train" if train else "test"
            return cached_digits(self.root, STAND_IN_SIZES[split], self.split_seed(split))
        try:
            # By the same name, but without `processed/`, which an old version may have left beside the files.
            kind = type(self.source.__name__, (self.source,), {"_check_legacy_exist": lambda dataset: False})
            dataset: Any = kind(str(self.root), train=train)
        except Exception as error:  # any failure of a parser on a damaged file
            raise UserError(
                f"data.root: {self.torchvision_name} in {self.root} cannot be read ({in_one_line(error, 200)}); "
                "delete it and run again"
            ) from error
        images, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets).long()
        images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
        return images, labels

    def _missing(self, why: str) -> str:
        """What is said of missing files. Raises it as a UserError where no digits may stand in for them."""
        missing = f"{self.torchvision_name} is not in {self.root.resolve()} and {why}; put its files there"
        can_stand_in = self.image_shape == DIGIT_SHAPE
        if self.offline == "error" or not can_stand_in:
            digits = ", or data.offline=digits to train on rendered digits instead" if can_stand_in else ""
            raise UserError(f"data.root: {missing}, write data.root=<folder> where they are{digits}")
        return missing

    def _complete(self) -> bool:
        return all(os.path.isfile(self.root / file) for file in self.files)

    def _download(self) -> None:
        with contextlib.ExitStack() as held:
            prefix = f".{self.torchvision_name}-"
            try:
                held.enter_context(files.lock(self.root / f".{self.torchvision_name}.lock", waits=True))
                for left in self.root.glob(f"{prefix}*"):  # of a download that was killed
                    shutil.rmtree(left, ignore_errors=True)
            except OSError as error:  # it is another user's
                where = f"data.root: {self.root} cannot be locked ({error.strerror})"
                warn(f"{where}: do not start a second process that downloads there")
            if self._complete():
                return  # another job has downloaded them meanwhile
            with tempfile.TemporaryDirectory(prefix=prefix, dir=self.root) as folder:
                print(f"downloading {self.torchvision_name} to {self.root} …", flush=True)
                before = socket.getdefaulttimeout()
                socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)  # a download that receives nothing is given up
                try:
                    self.source(folder, download=True)
                finally:
                    socket.setdefaulttimeout(before)
                self._verify(Path(folder))
                for file in self.files:
                    if not (self.root / file).exists():
                        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
                        os.replace(Path(folder) / file, self.root / file)

    def _verify(self, root: Path, missing: bool = False) -> None:
        """Raise UserError unless the files are the official ones; with `missing` some may not be there."""
        for file, md5 in self.files.items():
            path, what = root / file, ""
            try:
                if not (missing and not os.path.exists(path)) and not check_integrity(path, md5):
                    what = "is not the official file"
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
            if what:
                raise UserError(
                    f"data.root: {path}: {what}; delete it and run again to download it, or put the official file there"
                )


def _fitting(option: str, asked: int | None, there: int, what: str) -> int:
    """How many samples are used; UserError if more are asked for than there are."""
    if asked is not None and asked > there:
        raise UserError(f"data.{option}: got {asked}, takes at most the {there} {what}")
    return asked or there
