"""Adapt any LightningDataModule to the interface of DataModule, with None for what it does not provide."""

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

_READ_AFTER_SETUP = ("num_samples", "fingerprint", "resume_at")  # optional members that may need `setup` first


class PlainData:
    """Gives a LightningDataModule the interface of a DataModule. What the module does not provide is unknown.

    Without a spec it can only train LightningModules.
    """

    def __init__(self, module: LightningDataModule):
        self.module: Any = module
        self.spec: DataSpec | None = None
        self.why_no_spec = ""  # the error of a `spec` that fails; not raised, because the name may mean anything
        try:
            self.spec = _read_spec(module)
        except UserError as error:
            self.why_no_spec = str(error)
        name = getattr(module, "name", None)
        self.name = name if isinstance(name, str) and name else type(module).__name__
        self.prepare_data, self.setup = module.prepare_data, module.setup

    @cached_property
    def batch_size(self) -> int | None:
        """Samples a step, on each device; None if the module has no `batch_size`. UserError if reading it fails.

        The caller may set it to the size of a batch; the module does not change.
        """
        with self._convert_errors("batch_size"):
            batch_size = getattr(self.module, "batch_size", None) or self.module.hparams.get("batch_size")
        return int(batch_size) if isinstance(batch_size, numbers.Integral) else None

    def check(self) -> None:
        """As DataModule."""
        if check := self._bind_method("check"):
            check()

    def num_samples(self, split: Split) -> int | None:
        """As DataModule; None if the module has no `num_samples`. UserError if the result is not an integer."""
        count_samples = self._bind_method("num_samples", split)
        with self._convert_errors("num_samples"):
            count = count_samples() if count_samples else None
            return None if count is None else operator.index(count)

    @property
    def fingerprint(self) -> str:
        """As DataModule; `unknown` if the module has no `fingerprint`."""
        fingerprint = getattr(self.module, "fingerprint", "unknown")
        return "unknown" if callable(fingerprint) else str(fingerprint)

    @property
    def needs_early_setup(self) -> bool:
        """Whether the members need `setup` before the fit. Lightning calls `setup` again, which may be slow."""
        has_size = vars(self.module).get("batch_size") or self.module.hparams.get("batch_size")
        return not has_size or any(hasattr(type(self.module), name) for name in _READ_AFTER_SETUP)

    def resume_at(self, epoch: int, batches: int) -> None:
        """As DataModule. Otherwise, a loader with a `state_dict` continues, and another one loses batches."""
        if resume := self._bind_method("resume_at", epoch, batches):
            resume()

    def warn_of_lost_batches(self) -> None:
        """Warn that an epoch that is resumed before its end may lose batches."""
        if not self._bind_method("resume_at", 0, 0):
            warn(
                f"resume: {self.name} has no resume_at; unless its training loader has a length and a state_dict, the rest of "
                "the epoch is trained on other batches"
            )

    @contextlib.contextmanager
    def _convert_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (AttributeError, TypeError, ValueError) as error:  # from the module's code
            raise UserError(f"data: {self.name}: {name}: {in_one_line(error)}") from error

    def _bind_method(self, name: str, *arguments: Any) -> Callable[[], Any] | None:
        """Return a method bound to these arguments; None if there is no method of this name that takes them."""
        method: Any = getattr(self.module, name, None)
        try:
            live_signature(method).bind(*arguments)
        except (TypeError, ValueError):  # ValueError: the signature is unknown
            return None
        return partial(method, *arguments)


Data = DataModule | PlainData


def described(module: LightningDataModule) -> Data:
    """Return a DataModule as it is, after checks, and any other LightningDataModule as PlainData.

    UserError for a DataModule without a `spec`, or with its own `train_dataloader`.
    """
    if not isinstance(module, DataModule):
        return PlainData(module)
    name, spec = type(module).__name__, _read_spec(module)
    if spec is None:
        raise UserError(f"data: {name} has no spec: a property that returns a batchscope.data.DataSpec")
    if type(module).train_dataloader is not DataModule.train_dataloader:  # ranks share the order of the base class
        raise UserError(f"data: {name} has a train_dataloader of its own: derive it from LightningDataModule")
    if module.name is None:  # Lightning's default
        module.name = name
    if module.augment is not None and module.augment.is_on:
        _check_augment(module.augment, module.name, spec)
    return module


def _read_spec(module: Any) -> DataSpec | None:
    """Return the `spec` of a module; None if it has none. UserError if reading it fails."""
    try:
        # `getattr` with a default would hide a property that raises AttributeError.
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
    """Set up the test set; return whether there is one: a `test` split, or the loader of a `test_dataloader`."""
    if isinstance(data, PlainData) and not is_overridden("test_dataloader", data.module):
        return False
    try:
        data.setup("test")
    except NotImplementedError:
        return False
    return not isinstance(data, PlainData) or data.module.test_dataloader() is not None


def set_up_for_fit(data: Data, model: nn.Module, trainer: Trainer) -> None:
    """Call `setup` before a fit, if needed. As in Lightning, `setup` may read the trainer and the trainer's module."""
    lightning_datamodule(data).trainer = trainer
    if isinstance(model, LightningModule):
        trainer.strategy.connect(model)
    if isinstance(data, DataModule) or data.needs_early_setup:
        data.setup("fit")


def lightning_datamodule(data: Data) -> LightningDataModule:
    """Return the LightningDataModule itself, for a Trainer."""
    return data.module if isinstance(data, PlainData) else data
