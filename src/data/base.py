"""DataModule: what the training program has to know of a dataset, whatever way its samples are stored and served."""

import copy
import inspect
import math
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
from lightning import LightningDataModule, LightningModule

from ..errors import UserError
from ..options.types import NonNegativeInt, PositiveInt, Purpose, Seed
from .augment import Augment
from .spec import DataSpec

Split = Literal["train", "val", "test"]
STAGE_SPLITS: dict[str, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
# Evaluation gives the same numbers at any batch size, so it takes one that keeps a device busy. MAX_EVAL_BYTES limits
# the inputs, because activations grow with them: 256 images of CIFAR-10 are 3 MiB, of 3×224×224 they are 147 MiB.
MIN_EVAL_BATCH_SIZE = 256
MAX_EVAL_BYTES = 16 * 2**20


class DataModule(LightningDataModule):
    """A dataset that says what it is, and whose order of batches depends on (seed, epoch) alone.

    A subclass sets `kind` and `name`, gives `spec`, and says where its samples come from. Three subclasses do most of it:
    TensorDataModule (tensors in memory), DatasetModule (a torch Dataset) and StreamDataModule (files that are read one
    after the other).

    Args:
        batch_size: samples a step, on each device.
        num_workers: processes that load samples; 0 loads them in the training process.
        seed: of the order of samples, of a train/validation split and of generated samples.
        augment: what changes the images of a training batch on the device; None for nothing.
    """

    kind: ClassVar[str]
    name: str  # pyrefly: ignore[bad-override-mutable-attribute]  # Lightning allows None

    def __init__(
        self,
        batch_size: PositiveInt = 128,
        num_workers: Annotated[NonNegativeInt, Purpose.SPEED] = 2,
        seed: Seed = 0,
        augment: Any = None,
    ):
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        if not isinstance(augment, Augment | None):
            options = ", ".join(f"data.augment.{name}" for name in inspect.signature(Augment).parameters)
            raise UserError(f"data.augment: got {augment!r}, takes null; its options are {options}")
        self.augment: Augment | None = augment
        self._start = (0, 0)
        if self.augment is not None and self.augment.is_on:  # otherwise the hook would be timed in every step
            self.on_after_batch_transfer = self._augmented

    @property
    def spec(self) -> DataSpec:
        """What a model has to know of the data; available before anything is loaded."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UserError for mistakes that can be seen before the run starts. Writes nothing."""

    def num_samples(self, split: Split) -> int | None:
        """How many samples a split has, once `setup` has been called; None if nobody knows before they are read."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """A hash of the training and validation data: runs with equal fingerprints saw the same data."""
        raise NotImplementedError

    def resume_at(self, epoch: int, batches: int) -> None:
        """Start training in `epoch`, after the first `batches` batches of it."""
        self._start = (epoch, batches)

    def check_batch(self, min_samples: int) -> None:
        """Raise UserError if a batch has fewer than `min_samples` samples, which the model needs in training."""
        if self.batch_size < min_samples:
            raise UserError(
                f"data.batch_size: got {self.batch_size}, takes {min_samples} or more with this model: in training its "
                "batch normalisation needs more than one value a channel"
            )

    def split_seed(self, split: Split) -> int:
        """A different seed for each split, so that no split repeats generated samples of another."""
        return self.seed * 3 + ("train", "val", "test").index(split)

    def generator(self, split: Split) -> torch.Generator:
        """A random number generator for a split."""
        return torch.Generator().manual_seed(self.split_seed(split))

    def for_workers(self) -> Self:
        """A copy for a worker process: without the trainer, which cannot be pickled."""
        twin = copy.copy(self)
        twin.trainer = None
        vars(twin).pop("on_after_batch_transfer", None)
        return twin

    def _augmented(self, batch: Any, dataloader_idx: int) -> Any:
        """The hook `on_after_batch_transfer`, with the images of a training batch augmented."""
        batch = cast(Any, type(self)).on_after_batch_transfer(self, batch, dataloader_idx)  # a subclass may have one
        trainer = self.trainer
        if trainer is None or not trainer.training or self.augment is None:
            return batch
        number = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        first = cast(Any, trainer.train_dataloader).batch_sampler.first_sample(number)
        x = self.augment(self.spec.parts(batch)[0], self.seed, trainer.current_epoch, first)
        return {**batch, self.spec.fields[0]: x} if self.spec.fields else [x, *batch[1:]]

    @property
    def _module(self) -> LightningModule | None:
        return self.trainer.lightning_module if self.trainer else None

    @property
    def _min_samples(self) -> int:
        """The fewest samples that a rank can train on."""
        return getattr(self._module, "min_samples", 1)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def _eval_batch_size(self, shape: Any, element_size: int = 4) -> int:
        """The batch size of an evaluation, for samples of a shape; a model may resize them."""
        sample_bytes = math.prod(getattr(self._module, "input_shape", shape)) * element_size
        return max(self.batch_size, min(MIN_EVAL_BATCH_SIZE, MAX_EVAL_BYTES // max(1, sample_bytes)))

    def _check_enough(self, samples: int, world_size: int) -> None:
        """Refuse a training set that has too few samples for a step of every rank."""
        min_samples = self._min_samples
        self.check_batch(min_samples)
        if samples < world_size * min_samples:
            needed = f", and a step of each takes {min_samples} at least" if min_samples > 1 else ""
            raise UserError(
                f"trainer.devices: {world_size} processes{needed}, and {self.name} has {samples} training samples"
            )


def wrong_labels(spec: DataSpec, y: torch.Tensor) -> torch.Tensor | None:
    """The indices `(n, dims)` of labels that are no class; None if there is none. On a GPU they would raise an assertion
    many steps later, without a name.
    """
    if spec.target == "value" or not y.numel():
        return None
    wrong = ((y < 0) | (y >= spec.num_outputs)).nonzero()
    return wrong if len(wrong) else None
