"""What autograd saves for the backward pass, seen in the steps of the training itself."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .._torch import saved_tensors, storage_id
from .traffic import storages


class SavedTensors:
    """Bytes of the tensors on a device that autograd saves: the most that existed at one time, each storage once.

    Not seen are tensors that a function keeps as attributes of its `ctx`, the interior of a region that activation
    checkpointing computes again, and regions under saved-tensor hooks of their own.
    """

    def __init__(self, device: torch.device):
        self.most = 0
        self._device = device.type
        self._others: set[int] = set()  # storages that are no part of it
        self._alive: dict[int, tuple[int, weakref.ref]] = {}
        self._held = 0

    @contextmanager
    def watch(self, others: Iterable[object]) -> Iterator[None]:
        """Watch a forward pass in this thread. The tensors among `others`, such as parameters and the batch, do not count."""
        self._others = {storage_id(storage) for each in others for storage in storages(each)}
        with saved_tensors(self._note):
            yield

    def _note(self, saved: Tensor) -> None:
        for storage in storages(saved):
            key = storage_id(storage)
            if storage.device.type != self._device or key in self._alive or key in self._others:
                continue
            self._alive[key] = storage.nbytes(), weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._held += storage.nbytes()
            self.most = max(self.most, self._held)

    def _forget(self, key: int) -> None:
        size, _ = self._alive.pop(key)
        self._held -= size
