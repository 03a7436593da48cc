"""DataModule: a dataset with a DataSpec, whose order of samples depends only on (seed, epoch)."""

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
from .augment import Augment, warp_images
from .collate import Collate
from .loader import Loader, SampleBatches, TensorBatches, load_isolated
from .order import DeterministicBatchSampler, epoch_seed, rank_and_world_size
from .spec import LENGTHS, DataSpec, computed_shape
from .workers import data_error

Split = Literal["train", "val", "test"]
STAGE_SPLITS: dict[str, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
# Evaluation gives the same numbers at any batch size, so it takes one that keeps a device busy. MAX_EVAL_BYTES limits
# the inputs, because activations grow with them: 256 images of CIFAR-10 take 3 MiB, 256 images of 3×224×224 take 147
# MiB. The activation memory of a network outside the zoo is unknown: it is evaluated in batches of its training's size.
MIN_EVAL_BATCH_SIZE = 256
MAX_EVAL_BYTES = 16 * 2**20
_NUM_HASHED = 16  # samples of each split that the fingerprint covers
_NAMES = {"train": "training", "val": "validation", "test": "test"}  # of the splits in messages


class DataModule(LightningDataModule):
    """A map-style dataset, whose samples are loaded by index in `num_workers` processes.

    A subclass sets `kind` and `name`, defines `spec`, and returns a split's torch Dataset from `dataset`. It has a
    `len`, and samples are tuples `(x, y)` or dicts with the fields of the spec. TensorDataModule is for tensors in
    memory. A `collate_fn`, a method or `staticmethod` that takes a list of samples, replaces the default collation.

    Args:
        batch_size: samples a step, on each device.
        num_workers: processes that load samples; 0 loads them in the training process.
        seed: the seed of the order of samples, of a train/validation split and of generated samples.
        augment: the Augment that changes the images of a training batch on the device; None for no change.
    """

    kind: ClassVar[str]
    # Whether samples draw from the global generators of Python, NumPy and torch, which are then seeded for each sample,
    # in evaluation alike in every epoch. `__getitem__` has to seed other generators, such as those of Albumentations.
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
        self._datasets: dict[Split, Any] = {}
        if self.augment is not None and self.augment.is_on:  # a hook is timed in every step
            self.on_after_batch_transfer = self._augment_after_transfer

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the trainer: a `collate_fn` that is a method is pickled to spawned workers with its DataModule."""
        return {**vars(self), "trainer": None}

    @property
    def spec(self) -> DataSpec:
        """The DataSpec, which is all that a model has to know of the data; available before anything is loaded."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UserError for mistakes that can be seen before the run starts. Writes nothing."""

    def dataset(self, split: Split) -> Dataset:
        """Return the samples of a split."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        for split in STAGE_SPLITS.get(stage, ()):
            if split not in self._datasets:
                try:
                    samples: Any = self.dataset(split)
                    size = len(samples)  # an iterable dataset has no length
                except Exception as error:
                    if split == "test" and isinstance(error, NotImplementedError):
                        raise  # there is no test set (plain.has_test)
                    raise data_error(f"the {split} split of {self.name} cannot be loaded", error) from error
                if not size:
                    raise UserError(f"data: {self.name} has no samples in its {split} split")
                self._datasets[split] = samples

    def num_samples(self, split: Split) -> int:
        """Return the number of samples of a split, once `setup` has been called."""
        return len(self._datasets[split])

    def timesteps(self, batch: Any) -> int | None:
        """Return the time steps of a batch without padding, the sum of its lengths, before it is copied to a device.

        Return None if the spec determines the number (T for each sample), or if it is unknown.
        """
        lengths = self._spec.named(batch).get(LENGTHS) if self._spec.variable_length else None
        return int(lengths.sum()) if lengths is not None and lengths.device.type == "cpu" else None

    @property
    def fingerprint(self) -> str:
        """A hash of the sizes of the training and the validation split, and of 16 samples spread over each of them.

        They are collated as a batch, so that a fault of every batch is reported before a run begins. They are loaded
        twice: of a tensor that differs, such as one with random noise, only dtype and shape are hashed.
        """
        digest, keys = hashlib.blake2b(digest_size=8), list[tuple[Split, list[int]]]()
        for split in STAGE_SPLITS["fit"]:
            last_index = self.num_samples(split) - 1
            keys += [(split, [*dict.fromkeys(i * last_index // (_NUM_HASHED - 1) for i in range(_NUM_HASHED))])] * 2
        splits: dict[str, SampleBatches] = {split: self._sample_batches(split) for split, _ in keys}
        loads = load_isolated(splits, keys, self.seed, self._num_processes)
        for split, batches in zip(STAGE_SPLITS["fit"], zip(loads, loads, strict=True), strict=True):
            digest.update(str((split, self.num_samples(split))).encode())
            for tensor, reloaded in zip(*map(_cpu_tensors, batches), strict=False):
                shape = tuple(tensor.shape) if tensor.shape == reloaded.shape else tensor.dim()
                digest.update(str((tensor.dtype, shape)).encode())
                data, reloaded_data = (t.view(-1).view(torch.uint8) for t in (tensor, reloaded))
                if torch.equal(data, reloaded_data):
                    digest.update(data.numpy().data)
        return digest.hexdigest()

    @override
    def train_dataloader(self) -> Loader:
        """Return batches shuffled by (seed, epoch), also a short last one; UserError if a rank would get no sample.

        With `trainer.overfit_batches` samples are not shuffled, as in Lightning. A last batch that is too small to
        train batch norm on joins the batch before it.
        """
        modules = () if self._module is None else self._module.modules()
        has_norm = any(isinstance(module, BATCH_NORM) for module in modules)
        shuffle = not getattr(self.trainer, "overfit_batches", 0)
        order = {"seed": self.seed, "start": self._start, "min_samples": 2 if has_norm else 1}
        return self._build_loader("train", self.batch_size, shuffle=shuffle, **order)

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
        """Return a different seed for each split, so that no split repeats generated samples of another."""
        return self.seed * 3 + ("train", "val", "test").index(split)

    def generator(self, split: Split) -> torch.Generator:
        """Return a random number generator for a split."""
        return torch.Generator().manual_seed(self.split_seed(split))

    @cached_property
    def _spec(self) -> DataSpec:
        """The cached spec: every batch reads it."""
        return self.spec

    def _augment_after_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Run the hook `on_after_batch_transfer` of the class, then augment the images of a training batch.

        Because the datamodule has this hook, Lightning skips the module's. Call that one if the class has no hook.
        """
        hook, module = cast(Any, type(self)).on_after_batch_transfer, self._module
        batch = self._augment_batch(hook(self, batch, dataloader_idx))
        if hook is not LightningDataModule.on_after_batch_transfer or module is None:
            return batch
        return module.on_after_batch_transfer(batch, dataloader_idx)

    def _augment_batch(self, batch: Any) -> Any:
        """Return a batch, in training with augmented images."""
        trainer = self.trainer
        if trainer is None or not trainer.training or self.augment is None:
            return batch
        batch_idx = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        position = cast(Any, trainer.train_dataloader).batch_sampler.first_sample(batch_idx)
        spec = self._spec
        fields = spec.named(batch)
        image = fields[spec.inputs[0]]
        maps = self.augment.draw_maps(image, self.seed, trainer.current_epoch, position)
        # Other inputs of the image's height and width get the same maps.
        image_names = (
            name for name in spec.inputs if fields[name].dim() in (3, 4) and fields[name].shape[-2:] == image.shape[-2:]
        )
        warped = {name: warp_images(fields[name], maps) for name in image_names}
        if spec.target.endswith("_per_pixel"):  # labels are not interpolated, so they become int64
            y = fields[spec.fields[-1]]
            warped[spec.fields[-1]] = warp_images(y.long(), maps).to(y.dtype)
        values = [warped.get(name, value) for name, value in fields.items()]
        if isinstance(batch, torch.Tensor):
            return values[0]
        return {**batch, **warped} if isinstance(batch, Mapping) else [*values, *batch[len(values) :]]

    @property
    def _num_processes(self) -> int:
        """The number of processes that load samples."""
        return self.num_workers

    @property
    def _module(self) -> LightningModule | None:
        return self.trainer.lightning_module if self.trainer else None

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def check_ranks(self, split: Split, ranks: int) -> None:
        """Raise UserError if a split has fewer samples than ranks, because each rank needs a sample."""
        if (size := self.num_samples(split)) < ranks:
            raise UserError(f"trainer.devices: {ranks} processes, and {self.name} has {size} {_NAMES[split]} samples")

    def _eval_loader(self, split: Split) -> Loader:
        """Return batches in the stored order, larger than in training where a larger one surely fits into memory."""
        module, batch_size = self._module, self.batch_size
        if module is None or getattr(module, "is_of_zoo", False) is True:
            sample_bytes = 4 * len(self.spec.inputs) * math.prod(computed_shape(module, self.spec))
            batch_size = max(batch_size, min(MIN_EVAL_BATCH_SIZE, MAX_EVAL_BYTES // max(1, sample_bytes)))
        return self._build_loader(split, batch_size, shuffle=False)

    def _build_loader(self, split: Split, batch_size: int, **order: Any) -> Loader:
        rank, world_size = rank_and_world_size()
        self.check_ranks(split, world_size)
        batches = self._split_batches(split)
        num_workers = 0 if isinstance(batches, TensorBatches) else self._num_processes
        sampler = DeterministicBatchSampler(self.num_samples(split), batch_size, **order)
        seed = epoch_seed(self.split_seed(split), rank)
        return Loader(batches, sampler, self._device, num_workers, self._wait_context, self.timesteps, seed)

    def _split_batches(self, split: Split) -> TensorBatches | SampleBatches:
        """Return the dataset that makes the batches of a split."""
        return self._sample_batches(split)

    def _sample_batches(self, split: Split) -> SampleBatches:
        seed = self.split_seed(split) if self.randomised else None
        source, is_evaluated = f"{self.name}'s {split} split", split != "train"
        return SampleBatches(self._datasets[split], self.spec, source, seed, self.collate_fn, is_evaluated)

    def _wait_context(self) -> AbstractContextManager[object]:
        """Make the profiler count the wait for a prefetched batch as transfer, although it is in `next(loader)`."""
        return profiler_of(self.trainer).profile("[Loader].batch_to_device") if self.trainer else nullcontext()


def _cpu_tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, on the CPU."""
    return [leaf.detach().cpu().contiguous() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
