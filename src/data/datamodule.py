"""TensorDataModule: what every dataset shares. A new one says what it is (`spec`) and where its tensors come from."""

import hashlib
import math
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import connection, parent_process
from typing import Annotated, ClassVar, Literal

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from ..errors import UserError
from ..options.types import NonNegativeInt, PositiveInt, Purpose, Seed
from .loader import DeterministicBatchSampler, TensorLoader, rank_and_world
from .spec import DataSpec

Split = Literal["train", "val", "test"]
# Evaluation gives the same numbers at any batch size, so it takes one at which devices are not idle, as far as its inputs
# are small: what a network holds of a batch grows with them. 256 images of CIFAR-10 are 3 MiB, of 3×224×224 are 147 MiB.
MIN_EVAL_BATCH_SIZE = 256
MAX_EVAL_BYTES = 16 * 2**20


class TensorDataModule(lightning.LightningDataModule):
    """A dataset that fits in memory, served in whole batches of tensors.

    A subclass sets `kind` and `name`, gives `spec`, and loads a split as `(x, y)` in `load`.

    Args:
        batch_size: samples a step, of one device.
        pipeline: `memory` indexes the set as one tensor, pinned and copied ahead on a GPU; `device` keeps the set on
            the accelerator; `workers` is an ordinary per-sample DataLoader.
        num_workers: processes of the `workers` pipeline; 0 loads in the training process.
        seed: of the order of samples, of the train/validation split and of what is generated.
    """

    kind: ClassVar[str]
    name: str

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
        self._splits: dict[str, tuple[Tensor, Tensor]] = {}
        self._begin = (0, 0)

    @property
    def spec(self) -> DataSpec:
        """What a model has to know of the data; available before anything is loaded."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UserError for what can be seen to be wrong before the run starts. Writes nothing."""

    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """The inputs `x: (N, …)` and targets `y: (N,)` or `(N, T)` of a split, ready to be trained on."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Load the splits that the stage needs, once.

        Raises:
            UserError: if a label is none of the classes.
        """
        for split in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage, ()):
            if split not in self._splits:
                x, y = self.load(split)
                self._check_labels(split, y)
                self._splits[split] = (x, y)

    def _check_labels(self, split: Split, y: Tensor) -> None:
        """On a GPU a label out of range is an assertion without a name, many steps later."""
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
        """A seed of its own for each split of what is generated, so that none repeats another."""
        return self.seed * 3 + ("train", "val", "test").index(split)

    def generator(self, split: Split) -> torch.Generator:
        """A generator of random numbers for a split."""
        return torch.Generator().manual_seed(self.split_seed(split))

    @property
    def fingerprint(self) -> str:
        """A hash of the training and validation tensors: two runs with the same one saw the same data."""
        digest = hashlib.blake2b(digest_size=8)
        for split in ("train", "val"):
            for tensor in self._splits[split]:
                digest.update(str((split, tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def resume_at(self, epoch: int, batches: int) -> None:
        """Have the training begin in an epoch of which the first `batches` batches have been trained."""
        self._begin = (epoch, batches)

    def train_dataloader(self) -> TensorLoader | DataLoader:
        """Shuffled by (seed, epoch); the short last batch is kept.

        Raises:
            UserError: if there are not enough samples for every process.
        """
        samples, processes = len(self._splits["train"][0]), rank_and_world()[1]
        min_samples = getattr(self._module, "min_samples", 1)
        self.check_batch(min_samples)
        if samples < processes * min_samples:
            needed = f", and a step of each takes {min_samples} at least" if min_samples > 1 else ""
            raise UserError(
                f"trainer.devices: {processes} processes{needed}, and {self.name} has {samples} training samples"
            )
        batches = DeterministicBatchSampler(samples, self.batch_size, True, self.seed, self._begin, min_samples)
        return self._loader("train", batches)

    def check_batch(self, min_samples: int) -> None:
        """See that a batch is large enough for the model to be trained on.

        Args:
            min_samples: as the model takes them in a step of one process.

        Raises:
            UserError: if it is not.
        """
        if self.batch_size < min_samples:
            raise UserError(
                f"data.batch_size: got {self.batch_size}, takes {min_samples} or more with this model: in training its "
                "batch normalisation needs more than one value a channel"
            )

    def val_dataloader(self) -> TensorLoader | DataLoader:
        """In the stored order."""
        return self._eval_loader("val")

    def test_dataloader(self) -> TensorLoader | DataLoader:
        """In the stored order."""
        return self._eval_loader("test")

    def _eval_loader(self, split: Split) -> TensorLoader | DataLoader:
        x = self._splits[split][0]
        sample_bytes = math.prod(getattr(self._module, "input_shape", x.shape[1:])) * x.element_size()
        batch_size = max(self.batch_size, min(MIN_EVAL_BATCH_SIZE, MAX_EVAL_BYTES // sample_bytes))
        return self._loader(split, DeterministicBatchSampler(len(x), batch_size, shuffle=False))

    @property
    def _module(self) -> lightning.LightningModule | None:
        """What is trained or evaluated, where that is known: the loaders are asked for by its trainer."""
        return self.trainer.lightning_module if self.trainer else None

    def _loader(self, split: Split, batches: DeterministicBatchSampler) -> TensorLoader | DataLoader:
        tensors = self._splits[split]
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if self.pipeline == "workers":
            return DataLoader(
                TensorDataset(*tensors),
                batch_sampler=batches,
                collate_fn=partial(_collate, empty=[torch.empty_like(tensor[:0]) for tensor in tensors]),
                generator=torch.Generator().manual_seed(self.seed),  # its own, so that no draw of the model's is taken
                num_workers=self.num_workers,
                persistent_workers=self.num_workers > 0,
                worker_init_fn=_end_with_the_training,
                pin_memory=device.type == "cuda",
            )
        if self.pipeline == "device":
            tensors = self._splits[split] = tuple(tensor.to(device) for tensor in tensors)
        return TensorLoader(tensors, batches, device, self._waiting)

    def _waiting(self) -> AbstractContextManager[object]:
        """The wait for a batch that is copied ahead is called what Lightning calls moving a batch: the profiler, and
        whoever measures by it, then counts it as transfer, although it happens in the loader's `next`."""
        return self.trainer.profiler.profile("[TensorLoader].batch_to_device") if self.trainer else nullcontext()


def _end_with_the_training(worker: int) -> None:
    """Have a worker end when the training process does, killed or not.

    Torch's own workers look whether their parent still lives, which under the start method `forkserver` (the default
    from Python 3.14 on) is the server, and not the training process: they would wait forever for a killed one.
    """

    def wait() -> None:
        connection.wait([parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _collate(samples: list[tuple[Tensor, Tensor]], empty: list[Tensor]) -> list[Tensor]:
    """Torch's own, which makes nothing of a process's empty share."""
    return default_collate(samples) if samples else empty
