"""SampleBatches: the batches of a torch Dataset, as a worker process makes them."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from ..errors import UserError
from .collate import Collate, batch_of, empty_batch
from .order import epoch_seed
from .spec import DataSpec
from .workers import data_error, seeded, share


@dataclass(eq=False)
class SampleBatches(Dataset):
    """The batches of a Dataset, checked by what its data say of themselves."""

    samples: Any  # a torch Dataset
    spec: DataSpec
    source: str  # what an error calls it
    seed: int | None = None  # of the random numbers that the samples draw; None: they are left as they are
    collate_fn: Collate | None = None  # makes a batch of a list of samples, in place of ours

    def __getitems__(self, key: tuple[int, list[int]]) -> Any:
        """The batch of a key `(epoch, indices)`, or the UserError that its samples lead to."""
        epoch, indices = key
        asked = indices or [0]  # a rank without a sample loads one for its shapes
        try:
            batch = batch_of(self._load(epoch, asked), list(map(self._name, asked)), self.spec, self.collate_fn)
            batch = batch if indices else empty_batch(batch)
            return share(batch) if get_worker_info() else batch
        except UserError as error:
            return error

    def sample(self, epoch: int, index: int) -> Any:
        """One sample; UserError with its number if it cannot be loaded."""
        try:
            if self.seed is None:
                return self.samples[index]
            with seeded(epoch_seed(self.seed, epoch, index)):
                return self.samples[index]
        except Exception as error:
            raise data_error(f"sample {self._name(index)} cannot be loaded", error) from error

    def _load(self, epoch: int, indices: list[int]) -> list[Any]:
        together = getattr(self.samples, "__getitems__", None)
        if together is None or self.seed is not None:
            return [self.sample(epoch, index) for index in indices]
        try:
            return together(indices)
        except Exception as error:
            for index in indices:  # names the sample at fault
                self.sample(epoch, index)
            raise data_error(f"the samples from {self._name(indices[0])} on cannot be loaded", error) from error

    def _name(self, index: int) -> str:
        return f"number {index} of {self.source}"
