"""Any LightningDataModule that says its `spec`: what the training program has to know of it, and what it cannot know."""

import inspect
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning import LightningDataModule
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from ..errors import UserError, warn
from .augment import Augment
from .base import DataModule, Split
from .order import rank_and_world_size
from .spec import DataSpec


class PlainData:
    """A LightningDataModule that is no DataModule, with the names of one. What it does not say is not known.

    Without a spec it trains LightningModules alone.
    """

    def __init__(self, module: LightningDataModule):
        self.module: Any = module
        self.spec: DataSpec | None = _spec_of(module)
        name = getattr(module, "name", None)
        self.name = name if isinstance(name, str) and name else type(module).__name__
        self.prepare_data = module.prepare_data

    def setup(self, stage: str) -> None:
        """Load a stage. In a run of one process Lightning's second call is skipped: it would split the data again."""
        own = self.module.setup
        own(stage)
        self.module.setup = partial(_setup_unless_done, own, stage)

    @property
    def batch_size(self) -> int | None:
        """Samples a step, on each device; None where the module does not say it."""
        found = getattr(self.module, "batch_size", None) or self.module.hparams.get("batch_size")
        return int(found) if isinstance(found, numbers.Integral) else None

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        try:
            self.module.batch_size = batch_size
        except AttributeError as error:  # a property
            said = f"its batch_size is read-only, and {batch_size} samples are all that a batch can have"
            raise UserError(f"data: {self.name}: {said}") from error

    def check(self) -> None:
        """As DataModule."""
        if check := self._method("check"):
            check()

    def num_samples(self, split: Split) -> int | None:
        """As DataModule."""
        count = self._method("num_samples", split)
        found = count() if count else None
        if not isinstance(found, numbers.Integral | None):
            raise UserError(f"data: num_samples of {self.name} returns {found!r}, takes a whole number or None")
        return None if found is None else int(found)

    @property
    def fingerprint(self) -> str:
        """As DataModule, a property or a method; `unknown` where the module does not say it."""
        found = getattr(self.module, "fingerprint", "unknown")
        if callable(found):
            found = own() if (own := self._method("fingerprint")) else "unknown"
        return str(found)

    def resume_at(self, epoch: int, batches: int) -> None:
        """As DataModule; else loaders with a `state_dict` go on where they were, and other batches are lost."""
        if resume := self._method("resume_at", epoch, batches):
            resume()

    def warn_of_lost_batches(self) -> None:
        """Have a warning say what is lost of an epoch that is resumed before its end, once its loader is made."""
        if self._method("resume_at", 0, 0):
            return
        make = self.module.train_dataloader

        def train_dataloader() -> Any:
            self.module.train_dataloader = make  # it is said once
            loader = make()
            if lost := _lost(loader):
                warn(f"resume: {self.name}: {lost}")
            return loader

        self.module.train_dataloader = train_dataloader

    def _method(self, name: str, *arguments: Any) -> Callable[[], Any] | None:
        """The call of a method with these arguments; None for what takes others, or is none: its name may mean anything."""
        found: Any = getattr(self.module, name, None)
        try:
            inspect.signature(found).bind(*arguments)
        except (TypeError, ValueError):  # the second: nobody knows what it takes
            return None
        return partial(found, *arguments)


def _setup_unless_done(setup: Callable[[str], None], done: str, stage: str) -> None:
    if stage != done or rank_and_world_size()[1] > 1:  # a rank may take its part only now
        setup(stage)


def _lost(loader: Any) -> str | None:
    """What a run loses that is resumed within an epoch; None if it loses nothing."""
    loaders = tree_leaves(loader)
    if not all(hasattr(each, "state_dict") for each in loaders):
        other = "the rest of the epoch is trained on other batches than without the stop"
        return f"it has no resume_at, and its training loader no state_dict: {other}"
    if any(sized_len(each) is None for each in loaders):
        return "its training loader has no length: Lightning had fetched a batch ahead, which is left out"
    return None


Data = DataModule | PlainData


def described(module: LightningDataModule) -> Data:
    """What the training program has to know of any LightningDataModule; UserError if a DataModule has no `spec`."""
    if not isinstance(module, DataModule):
        return PlainData(module)
    name, spec = type(module).__name__, _spec_of(module)
    if spec is None:
        raise UserError(f"data: {name} has no spec: a property that returns a batchscope.data.DataSpec")
    if module.augment is not None and module.augment.is_on:
        _check_augment(module.augment, module.name, spec)
    return module


def _spec_of(module: LightningDataModule) -> DataSpec | None:
    try:
        spec = getattr(module, "spec", None)
    except NotImplementedError:
        return None
    return spec if isinstance(spec, DataSpec) else None


def _check_augment(augment: Augment, name: str, spec: DataSpec) -> None:
    if spec.kind != "image":
        raise UserError(f"data.augment: takes images, and {name} has {spec.kind} data")
    if spec.target == "class_per_step":
        raise UserError(
            f"data.augment: moves pixels, and {name} has a class for each row of an image, which would stay"
        )
    if spec.target == "any":
        raise UserError(f"data.augment: moves pixels, and the target of {name} is any, which would stay")
    height, width = spec.input_shape[1:]
    for option, pixels in (("shift", augment.shift), ("crop", augment.crop)):
        if pixels >= min(height, width):
            raise UserError(
                f"data.augment.{option}: got {pixels}, takes less than {min(height, width)}: the images of {name} have "
                f"{height}×{width} pixels"
            )


def has_test(data: Data) -> bool:
    """Whether there is a test set: a `test_dataloader` or, of a DataModule, a `test` split, which is loaded."""
    if isinstance(data, PlainData):
        return is_overridden("test_dataloader", data.module)
    try:
        data.setup("test")
    except NotImplementedError:
        return False
    return True


def lightning_of(data: Data) -> LightningDataModule:
    """The LightningDataModule itself, for a Trainer."""
    return data.module if isinstance(data, PlainData) else data
