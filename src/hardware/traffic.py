"""The bytes of the tensors that an operation reads and writes."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

# Operations that touch some rows of their first argument: as many bytes as they return, or as they get to write.
ROW_NAMES = ("embedding", "index", "index_select", "gather", "take")
ROW_NAMES += ("index_put", "_index_put_impl", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce")


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, also those in lists, without sparse and nested ones."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def storages(value: object) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors in a value; none for a tensor subclass without an accessible storage."""
    try:
        return [tensor.untyped_storage() for tensor in tensors(value)]
    except (RuntimeError, NotImplementedError):
        return []


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes that a read of the tensor touches: expanded dimensions count once; other overlaps are not detected."""
    num_elements = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(num_elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage, or its identity if it has no address."""
    return storage.data_ptr() or storage._cdata


class Cache:
    """Decides which bytes come from main memory: a tensor's do if more bytes than the cache holds were loaded since its last load.

    This is a first-in, first-out cache of whole tensors. A simpler rule asks whether the tensors of a single call fit into the
    cache. It calls a step `compute` if the weights of many layers exceed the cache only together ("MLP of large weights, batch 4"
    in `benchmarks/causes.py`), or if an optimizer updates one tensor after the other.

    Args:
        capacity: bytes of the cache; None for no cache.
    """

    def __init__(self, capacity: int | None):
        self._capacity = capacity or 0
        self._total_loaded = 0  # bytes loaded so far
        self._loaded_at: dict[tuple[int, int], int] = {}  # (address, offset) → `_total_loaded` after its last load

    def cold_bytes(self, tensor: Tensor, size: int, is_new: bool = False) -> int:
        """Return how many of the `size` bytes that a call touches come from main memory; `is_new` if the call makes the tensor."""
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() <= self._capacity  # the cache holds all of the storage, or nothing
        key = address(storage), 0 if is_small else int(tensor.storage_offset())
        loaded_at = self._loaded_at.get(key)
        if loaded_at is not None and self._total_loaded - loaded_at + size <= self._capacity:
            return 0
        self._total_loaded += size
        self._loaded_at[key] = self._total_loaded
        is_still_cached = is_new and loaded_at is None and size <= self._capacity  # its write is still in the cache
        return 0 if is_still_cached else size

    def cold_bytes_of_rows(self, table: Tensor, size: int) -> float:
        """Return the bytes from main memory of `size` bytes of table rows at any places: at best the part that fits is cached."""
        table_bytes = table.untyped_storage().nbytes()
        return size * max(0.0, 1 - self._capacity / table_bytes) if table_bytes else 0.0
