"""TensorDataModule, the base of every dataset: a subclass gives a `spec` and loads its tensors."""

import hashlib
import math
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import connection, parent_process
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typing_extensions import override

from .._lightning import profiler_of
from ..errors import UserError
from ..options.types import NonNegativeInt, PositiveInt, Purpose, Seed
from .loader import DeterministicBatchSampler, TensorLoader, rank_and_world_size
from .spec import DataSpec

Split = Literal["train", "val", "test"]
_STAGE_SPLITS: dict[str, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
# Evaluation gives the same numbers at any batch size, so it takes one that keeps a device busy. MAX_EVAL_BYTES limits
# the inputs, because activations grow with them: 256 images of CIFAR-10 are 3 MiB, of 3×224×224 they are 147 MiB.
MIN_EVAL_BATCH_SIZE = 256
MAX_EVAL_BYTES = 16 * 2**20


class TensorDataModule(LightningDataModule):
    """A dataset that fits in memory, served in whole batches of tensors.

    A subclass sets `kind` and `name`, gives `spec`, and returns a split as `(x, y)` from `load`.

    Args:
        batch_size: samples a step, on each device.
        pipeline: `memory` indexes one tensor in host memory, pinned and prefetched for a GPU; `device` keeps the set on
            the accelerator; `workers` is an ordinary per-sample DataLoader.
        num_workers: processes of the `workers` pipeline; 0 loads in the training process.
        seed: of the order of samples, of the train/validation split and of generated samples.
    """

    kind: ClassVar[str]
    name: str  # pyrefly: ignore[bad-override-mutable-attribute]  # Lightning allows None

    def __init__(
        self,
        batch_size: PositiveInt = 128,
        pipeline: Annotated[Literal["memory", "device", "workers"], Purpose.SPEED] = "memory",
        num_workers: Annotated[NonNegativeInt, Purpose.SPEED] = 2,
        seed: Seed = 0,
    ):
        super().__init__()
        self.batch_size = batch_size
        self.pipeline = pipeline
        self.num_workers = num_workers
        self.seed = seed
        self._splits: dict[Split, tuple[Tensor, Tensor]] = {}
        self._start = (0, 0)

    @property
    def spec(self) -> DataSpec:
        """What a model has to know of the data; available before anything is loaded."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UserError for mistakes that can be seen before the run starts. Writes nothing."""

    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """The inputs `x: (N, …)` and targets `y: (N,)` or `(N, T)` of a split, ready for training."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        for split in _STAGE_SPLITS.get(stage, ()):
            if split not in self._splits:
                x, y = self.load(split)
                self._check_labels(split, y)
                self._splits[split] = (x, y)

    def _check_labels(self, split: Split, y: Tensor) -> None:
        """Refuse labels out of range: on a GPU they raise an assertion many steps later, without a name."""
        if self.spec.target == "value" or not y.numel():
            return
        wrong = ((y < 0) | (y >= self.spec.num_outputs)).nonzero()
        if len(wrong):
            sample, label = int(wrong[0, 0]), int(y[tuple(wrong[0])])
            raise UserError(
                f"data: sample {sample} of {self.name}'s {split} split has the label {label}, and the classes are 0 to "
                f"{self.spec.num_outputs - 1}" + (f" ({len(wrong):,} such labels)" if len(wrong) > 1 else "")
            )

    def tensors(self, split: Split) -> tuple[Tensor, Tensor]:
        """The loaded tensors of a split."""
        return self._splits[split]

    def split_seed(self, split: Split) -> int:
        """A different seed for each split, so that no split repeats generated samples of another."""
        return self.seed * 3 + ("train", "val", "test").index(split)

    def generator(self, split: Split) -> torch.Generator:
        """A random number generator for a split."""
        return torch.Generator().manual_seed(self.split_seed(split))

    @property
    def fingerprint(self) -> str:
        """A hash of the training and validation tensors: runs with equal fingerprints saw the same data."""
        digest = hashlib.blake2b(digest_size=8)
        for split in _STAGE_SPLITS["fit"]:
            for tensor in self._splits[split]:
                digest.update(str((split, tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def resume_at(self, epoch: int, batches: int) -> None:
        """Start training in `epoch`, after the first `batches` batches of it."""
        self._start = (epoch, batches)

    @override
    def train_dataloader(self) -> TensorLoader | DataLoader:
        """Batches shuffled by (seed, epoch), also a short last one; UserError if a rank would get too few samples."""
        samples, world_size = len(self._splits["train"][0]), rank_and_world_size()[1]
        min_samples = getattr(self._module, "min_samples", 1)
        self.check_batch(min_samples)
        if samples < world_size * min_samples:
            needed = f", and a step of each takes {min_samples} at least" if min_samples > 1 else ""
            raise UserError(
                f"trainer.devices: {world_size} processes{needed}, and {self.name} has {samples} training samples"
            )
        batches = DeterministicBatchSampler(samples, self.batch_size, True, self.seed, self._start, min_samples)
        return self._loader("train", batches)

    def check_batch(self, min_samples: int) -> None:
        """Raise UserError if a batch has fewer than `min_samples` samples, which the model needs in training."""
        if self.batch_size < min_samples:
            raise UserError(
                f"data.batch_size: got {self.batch_size}, takes {min_samples} or more with this model: in training its "
                "batch normalisation needs more than one value a channel"
            )

    @override
    def val_dataloader(self) -> TensorLoader | DataLoader:
        return self._eval_loader("val")

    @override
    def test_dataloader(self) -> TensorLoader | DataLoader:
        return self._eval_loader("test")

    def _eval_loader(self, split: Split) -> TensorLoader | DataLoader:
        x = self._splits[split][0]
        sample_bytes = math.prod(getattr(self._module, "input_shape", x.shape[1:])) * x.element_size()
        batch_size = max(self.batch_size, min(MIN_EVAL_BATCH_SIZE, MAX_EVAL_BYTES // sample_bytes))
        return self._loader(split, DeterministicBatchSampler(len(x), batch_size, shuffle=False))

    @property
    def _module(self) -> LightningModule | None:
        return self.trainer.lightning_module if self.trainer else None

    def _loader(self, split: Split, batches: DeterministicBatchSampler) -> TensorLoader | DataLoader:
        x, y = self._splits[split]
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if self.pipeline == "workers":
            return DataLoader(
                TensorDataset(x, y),
                batch_sampler=batches,
                collate_fn=partial(_collate, empty=[torch.empty_like(tensor[:0]) for tensor in (x, y)]),
                generator=torch.Generator().manual_seed(self.seed),  # a private one: the model's draws stay the same
                num_workers=self.num_workers,
                persistent_workers=self.num_workers > 0,
                worker_init_fn=_exit_with_parent,
                pin_memory=device.type == "cuda",
            )
        if self.pipeline == "device":
            self._splits[split] = x, y = x.to(device), y.to(device)
        return TensorLoader((x, y), batches, device, self._wait_context)

    def _wait_context(self) -> AbstractContextManager[object]:
        """Have the profiler count the wait for a prefetched batch as transfer, although `next(loader)` contains it."""
        return profiler_of(self.trainer).profile("[TensorLoader].batch_to_device") if self.trainer else nullcontext()


class GeneratedDataModule(TensorDataModule):
    """A dataset that is generated, with any number of samples.

    Args:
        num_train, num_val, num_test: how many samples are generated; memory is the limit.
        **kwargs: as TensorDataModule.
    """

    def __init__(
        self,
        num_train: PositiveInt = 50_000,
        num_val: PositiveInt = 2_000,
        num_test: PositiveInt = 10_000,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}


def _exit_with_parent(worker: int) -> None:
    """Have a worker exit when the training process ends, even if that is killed.

    torch's workers watch their parent process, which under the start method `forkserver` is the server: the workers of
    a killed training process would wait forever.
    """
    parent = parent_process()
    assert parent is not None, "a worker has a parent process"

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _collate(samples: list[tuple[Tensor, Tensor]], empty: list[Tensor]) -> list[Tensor]:
    return default_collate(samples) if samples else empty  # torch cannot collate the empty batch of a rank
