"""Any LightningDataModule that says its `spec`: what the training program has to know of it, and what it cannot know."""

import contextlib
import numbers
import operator
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from ..errors import UserError, in_one_line, warn
from ..options.signatures import live_signature
from .augment import Augment
from .base import DataModule, Split
from .spec import DataSpec

_AFTER_SETUP = ("num_samples", "fingerprint", "resume_at")  # what a module may have that `setup` makes known


class PlainData:
    """A LightningDataModule that is no DataModule, with the names of one. What it does not say is not known.

    Without a spec it trains LightningModules alone.
    """

    def __init__(self, module: LightningDataModule):
        self.module: Any = module
        self.spec: DataSpec | None = None
        self.why_no_spec = ""  # where it has one that fails: its name may mean anything
        try:
            self.spec = _spec_of(module)
        except UserError as error:
            self.why_no_spec = str(error)
        name = getattr(module, "name", None)
        self.name = name if isinstance(name, str) and name else type(module).__name__
        self.prepare_data, self.setup = module.prepare_data, module.setup

    @cached_property
    def batch_size(self) -> int | None:
        """Samples a step, on each device; None where the module does not say it. UserError if it cannot say it.

        It may be set to what a batch holds, which changes nothing of the module.
        """
        with self._asked("batch_size"):
            found = getattr(self.module, "batch_size", None) or self.module.hparams.get("batch_size")
        return int(found) if isinstance(found, numbers.Integral) else None

    def check(self) -> None:
        """As DataModule."""
        if check := self._method("check"):
            check()

    def num_samples(self, split: Split) -> int | None:
        """As DataModule; None where the module does not say it. UserError for what is no whole number."""
        count = self._method("num_samples", split)
        with self._asked("num_samples"):
            found = count() if count else None
            return None if found is None else operator.index(found)

    @property
    def fingerprint(self) -> str:
        """As DataModule; `unknown` where the module does not say it."""
        found = getattr(self.module, "fingerprint", "unknown")
        return "unknown" if callable(found) else str(found)

    @property
    def tells_after_setup(self) -> bool:
        """Whether `setup` may make known what a run asks before its fit. Lightning calls it again, and it may take long."""
        has_size = vars(self.module).get("batch_size") or self.module.hparams.get("batch_size")
        return not has_size or any(hasattr(type(self.module), name) for name in _AFTER_SETUP)

    def resume_at(self, epoch: int, batches: int) -> None:
        """As DataModule; else loaders with a `state_dict` go on where they were, and other batches are lost."""
        if resume := self._method("resume_at", epoch, batches):
            resume()

    def warn_of_lost_batches(self) -> None:
        """Say what may be lost of an epoch that is resumed before its end."""
        if not self._method("resume_at", 0, 0):
            warn(
                f"resume: {self.name} has no resume_at; unless its training loader has a length and a state_dict, the rest of "
                "the epoch is trained on other batches"
            )

    @contextlib.contextmanager
    def _asked(self, name: str) -> Iterator[None]:
        try:
            yield
        except (AttributeError, TypeError, ValueError) as error:  # of the module's own code
            raise UserError(f"data: {self.name}: {name}: {in_one_line(error)}") from error

    def _method(self, name: str, *arguments: Any) -> Callable[[], Any] | None:
        """The call of a method with these arguments; None for what takes others, or is none: its name may mean anything."""
        found: Any = getattr(self.module, name, None)
        try:
            live_signature(found).bind(*arguments)
        except (TypeError, ValueError):  # the second: nobody knows what it takes
            return None
        return partial(found, *arguments)


Data = DataModule | PlainData


def described(module: LightningDataModule) -> Data:
    """What the training program has to know of any LightningDataModule.

    UserError for a DataModule without a `spec`, or with a training loader of its own.
    """
    if not isinstance(module, DataModule):
        return PlainData(module)
    name, spec = type(module).__name__, _spec_of(module)
    if spec is None:
        raise UserError(f"data: {name} has no spec: a property that returns a batchscope.data.DataSpec")
    if type(module).train_dataloader is not DataModule.train_dataloader:  # ranks share the order of ours
        raise UserError(f"data: {name} has a train_dataloader of its own: derive it from LightningDataModule")
    if module.name is None:  # as Lightning has it
        module.name = name
    if module.augment is not None and module.augment.is_on:
        _check_augment(module.augment, module.name, spec)
    return module


def _spec_of(module: Any) -> DataSpec | None:
    """What a module says of its data; None where it does not. UserError where it fails to."""
    try:
        # A property that raises AttributeError would be a missing attribute to `getattr`.
        spec = module.spec if hasattr(type(module), "spec") else getattr(module, "spec", None)
    except NotImplementedError:
        return None
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data: {type(module).__name__}.spec fails: {in_one_line(error)}") from error
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
    """Whether there is a test set, which is set up: a `test_dataloader` that returns one or, of a DataModule, a `test` split."""
    if isinstance(data, PlainData) and not is_overridden("test_dataloader", data.module):
        return False
    try:
        data.setup("test")
    except NotImplementedError:
        return False
    return not isinstance(data, PlainData) or data.module.test_dataloader() is not None


def set_up_for_fit(data: Data, model: nn.Module, trainer: Trainer) -> None:
    """Have data ready to be asked before a fit. A `setup` may ask the trainer, and that its module, as in Lightning."""
    lightning_of(data).trainer = trainer
    if isinstance(model, LightningModule):
        trainer.strategy.connect(model)
    if isinstance(data, DataModule) or data.tells_after_setup:
        data.setup("fit")


def lightning_of(data: Data) -> LightningDataModule:
    """The LightningDataModule itself, for a Trainer."""
    return data.module if isinstance(data, PlainData) else data
