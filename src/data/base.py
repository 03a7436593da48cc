"""DataModule: a dataset that says what it is, and whose batches come in an order that depends on (seed, epoch) alone."""

import hashlib
import inspect
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from lightning import LightningDataModule, LightningModule
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from typing_extensions import override

from .._lightning import profiler_of
from .._torch import BATCH_NORM
from ..errors import UserError
from ..options.types import NonNegativeInt, PositiveInt, Purpose, Seed, Where
from .augment import Augment, moved
from .collate import Collate
from .loader import Loader, SampleBatches, TensorBatches, load_apart
from .order import DeterministicBatchSampler, epoch_seed, rank_and_world_size
from .spec import LENGTHS, DataSpec, computed_shape
from .workers import data_error

Split = Literal["train", "val", "test"]
STAGE_SPLITS: dict[str, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
# Evaluation gives the same numbers at any batch size, so it takes one that keeps a device busy. MAX_EVAL_BYTES limits
# the inputs, because activations grow with them: 256 images of CIFAR-10 are 3 MiB, of 3×224×224 they are 147 MiB. What
# a network that is not of the zoo holds of a sample is unknown: it is evaluated in the batches of its training.
MIN_EVAL_BATCH_SIZE = 256
MAX_EVAL_BYTES = 16 * 2**20
_HASHED = 16  # samples of a split that the fingerprint covers
_SAID = {"train": "training", "val": "validation", "test": "test"}


class DataModule(LightningDataModule):
    """A dataset of which each sample is loaded by its number, in `num_workers` processes.

    A subclass sets `kind` and `name`, gives `spec`, and returns a split's torch Dataset from `dataset`: `len(…)` samples,
    each a tuple `(x, y)` or a dict with the fields of the spec. TensorDataModule is for tensors in memory. A `collate_fn`,
    a method or a `staticmethod` of a list of samples, makes batches in place of ours.

    Args:
        batch_size: samples a step, on each device.
        num_workers: processes that load samples; 0 loads them in the training process.
        seed: of the order of samples, of a train/validation split and of generated samples.
        augment: what changes the images of a training batch on the device; None for nothing.
    """

    kind: ClassVar[str]
    # Whether samples draw random numbers: the global generators of Python, NumPy and torch are then seeded for each sample; in an
    # evaluation alike in every epoch. A transform with a generator of its own, as of Albumentations, is seeded in `__getitem__`.
    randomised: ClassVar[bool] = False
    collate_fn: Collate | None = None
    name: str  # pyrefly: ignore[bad-override-mutable-attribute]  # Lightning allows None

    def __init__(
        self,
        batch_size: PositiveInt = 128,
        num_workers: Annotated[NonNegativeInt, Purpose.SPEED, Where("data.pipeline", ("workers",))] = 2,
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
        self._sets: dict[Split, Any] = {}
        if self.augment is not None and self.augment.is_on:  # otherwise the hook would be timed in every step
            self.on_after_batch_transfer = self._augmented

    def __getstate__(self) -> dict[str, Any]:
        """Without its trainer: workers that are started anew are sent the data with a `collate_fn` that is a method."""
        return {**vars(self), "trainer": None}

    @property
    def spec(self) -> DataSpec:
        """What a model has to know of the data; available before anything is loaded."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UserError for mistakes that can be seen before the run starts. Writes nothing."""

    def dataset(self, split: Split) -> Dataset:
        """The samples of a split."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        for split in STAGE_SPLITS.get(stage, ()):
            if split not in self._sets:
                try:
                    samples: Any = self.dataset(split)
                    number = len(samples)  # a stream has none
                except Exception as error:
                    if isinstance(error, MemoryError) or (split == "test" and isinstance(error, NotImplementedError)):
                        raise  # the second says that there is no test set (plain.has_test)
                    raise data_error(f"the {split} split of {self.name} cannot be loaded", error) from error
                if not number:
                    raise UserError(f"data: {self.name} has no samples in its {split} split")
                self._sets[split] = samples

    def num_samples(self, split: Split) -> int:
        """How many samples a split has, once `setup` has been called."""
        return len(self._sets[split])

    def timesteps(self, batch: Any) -> int | None:
        """The time steps of a batch without padding, before it is copied to a device: the sum of its lengths.

        None where the spec says it (T a sample), or nobody knows.
        """
        lengths = self._spec.named(batch).get(LENGTHS) if self._spec.variable_length else None
        return int(lengths.sum()) if lengths is not None and lengths.device.type == "cpu" else None

    @property
    def fingerprint(self) -> str:
        """A hash of the number of samples, and of 16 samples each, spread over the training and the validation split.

        These samples make the first batches, so that what is wrong with all batches is said before a run begins. They are
        loaded twice: of a tensor that differs, such as one with random noise, its type and shape alone are hashed.
        """
        digest, keys = hashlib.blake2b(digest_size=8), list[tuple[Split, list[int]]]()
        for split in STAGE_SPLITS["fit"]:
            last = self.num_samples(split) - 1
            keys += [(split, [*dict.fromkeys(i * last // (_HASHED - 1) for i in range(_HASHED))])] * 2
        loaded = load_apart({split: self._samples(split) for split, _ in keys}, keys, self.seed, self._workers)
        for split, pair in zip(STAGE_SPLITS["fit"], zip(loaded, loaded, strict=True), strict=True):
            digest.update(str((split, self.num_samples(split))).encode())
            for tensor, other in zip(*map(_plain_tensors, pair), strict=False):
                shape = tuple(tensor.shape) if tensor.shape == other.shape else tensor.dim()
                digest.update(str((tensor.dtype, shape)).encode())
                held, anew = (each.view(-1).view(torch.uint8) for each in (tensor, other))
                if torch.equal(held, anew):
                    digest.update(held.numpy().data)
        return digest.hexdigest()

    @override
    def train_dataloader(self) -> Loader:
        """Batches shuffled by (seed, epoch), also a short last one; UserError if a rank would get no sample.

        With `trainer.overfit_batches` they are not shuffled, as in Lightning. A last batch that batch norm could not be
        trained on joins the one before.
        """
        modules = () if (module := self._module) is None else module.modules()
        has_norm = any(isinstance(each, BATCH_NORM) for each in modules)
        shuffle = not getattr(self.trainer, "overfit_batches", 0)
        start = {"seed": self.seed, "start": self._start, "min_samples": 2 if has_norm else 1}
        return self._loader("train", self.batch_size, shuffle=shuffle, **start)

    @override
    def val_dataloader(self) -> Loader:
        return self._eval_loader("val")

    @override
    def test_dataloader(self) -> Loader:
        return self._eval_loader("test")

    def resume_at(self, epoch: int, batches: int) -> None:
        """Start training in `epoch`, after the first `batches` batches of it."""
        self._start = (epoch, batches)

    def split_seed(self, split: Split) -> int:
        """A different seed for each split, so that no split repeats generated samples of another."""
        return self.seed * 3 + ("train", "val", "test").index(split)

    def generator(self, split: Split) -> torch.Generator:
        """A random number generator for a split."""
        return torch.Generator().manual_seed(self.split_seed(split))

    @cached_property
    def _spec(self) -> DataSpec:
        """The spec, made once: it is asked for at every batch."""
        return self.spec

    def _augmented(self, batch: Any, dataloader_idx: int) -> Any:
        """The hook `on_after_batch_transfer`, with the images of a training batch augmented behind that of the data.

        Where the data have none, that of the module follows, which Lightning leaves out for this one.
        """
        own, module = cast(Any, type(self)).on_after_batch_transfer, self._module
        batch = self._moved(own(self, batch, dataloader_idx))
        if own is not LightningDataModule.on_after_batch_transfer or module is None:
            return batch
        return module.on_after_batch_transfer(batch, dataloader_idx)

    def _moved(self, batch: Any) -> Any:
        """A batch with its images augmented in training."""
        trainer = self.trainer
        if trainer is None or not trainer.training or self.augment is None:
            return batch
        number = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        first = cast(Any, trainer.train_dataloader).batch_sampler.first_sample(number)
        spec = self._spec
        named = spec.named(batch)
        image = named[spec.inputs[0]]
        maps = self.augment.maps_of(image, self.seed, trainer.current_epoch, first)
        # Of other inputs those that have the places of the image.
        like_images = (
            name for name in spec.inputs if named[name].dim() in (3, 4) and named[name].shape[-2:] == image.shape[-2:]
        )
        new = {name: moved(named[name], maps) for name in like_images}
        if spec.target.endswith("_per_pixel"):  # no label lies between two pixels
            y = named[spec.fields[-1]]
            new[spec.fields[-1]] = moved(y.long(), maps).to(y.dtype)
        parts = [new.get(name, part) for name, part in named.items()]
        if isinstance(batch, torch.Tensor):
            return parts[0]
        return {**batch, **new} if isinstance(batch, Mapping) else [*parts, *batch[len(parts) :]]

    @property
    def _workers(self) -> int:
        """The processes that load samples."""
        return self.num_workers

    @property
    def _module(self) -> LightningModule | None:
        return self.trainer.lightning_module if self.trainer else None

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def check_ranks(self, split: Split, ranks: int) -> None:
        """Raise UserError if a split has fewer samples than there are processes, each of which needs one."""
        if (samples := self.num_samples(split)) < ranks:
            raise UserError(f"trainer.devices: {ranks} processes, and {self.name} has {samples} {_SAID[split]} samples")

    def _eval_loader(self, split: Split) -> Loader:
        """Batches in the stored order: as large as in training, or as keeps a device busy where that surely fits."""
        module, batch_size = self._module, self.batch_size
        if module is None or getattr(module, "is_of_zoo", False) is True:
            sample_bytes = 4 * len(self.spec.inputs) * math.prod(computed_shape(module, self.spec))
            batch_size = max(batch_size, min(MIN_EVAL_BATCH_SIZE, MAX_EVAL_BYTES // max(1, sample_bytes)))
        return self._loader(split, batch_size, shuffle=False)

    def _loader(self, split: Split, batch_size: int, **order: Any) -> Loader:
        rank, ranks = rank_and_world_size()
        self.check_ranks(split, ranks)
        samples = self.num_samples(split)
        batches = self._batches(split)
        workers = 0 if isinstance(batches, TensorBatches) else self._workers
        sampler = DeterministicBatchSampler(samples, batch_size, **order)
        seed = epoch_seed(self.split_seed(split), rank)
        return Loader(batches, sampler, self._device, workers, self._wait_context, self.timesteps, seed)

    def _batches(self, split: Split) -> TensorBatches | SampleBatches:
        """What makes the batches of a split."""
        return self._samples(split)

    def _samples(self, split: Split) -> SampleBatches:
        seed = self.split_seed(split) if self.randomised else None
        source, is_evaluated = f"{self.name}'s {split} split", split != "train"
        return SampleBatches(self._sets[split], self.spec, source, seed, self.collate_fn, is_evaluated)

    def _wait_context(self) -> AbstractContextManager[object]:
        """Have the profiler count the wait for a prefetched batch as transfer, although `next(loader)` contains it."""
        return profiler_of(self.trainer).profile("[Loader].batch_to_device") if self.trainer else nullcontext()


def _plain_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors in a batch, on the CPU."""
    return [leaf.detach().cpu().contiguous() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
