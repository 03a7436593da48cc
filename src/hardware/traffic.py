"""The bytes of the tensors that an operation reads and writes."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

# Operations that touch some rows of their first argument: as much of it as they return, or as they are given to write.
IN_ROWS = ("embedding", "index", "index_select", "gather", "take")
IN_ROWS += ("index_put", "_index_put_impl", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce")


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, also those in lists, without sparse and nested ones."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def storages(value: object) -> list[torch.UntypedStorage]:
    """The storages of the tensors that a value consists of; none of a class of tensors that shows none."""
    try:
        return [tensor.untyped_storage() for tensor in tensors(value)]
    except (RuntimeError, NotImplementedError):
        return []


def touched_bytes(tensor: Tensor) -> int:
    """Bytes that reading the tensor takes: what is expanded counts once, and what overlaps is not known to."""
    numbers = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(numbers * tensor.element_size(), tensor.untyped_storage().nbytes())


def address(storage: torch.UntypedStorage) -> int:
    """Where a storage lies, or an identity of one that has no address."""
    return storage.data_ptr() or storage._cdata


class Cache:
    """Which bytes come from main memory: a tensor does once more than the cache holds has come since it did.

    That is a cache of whole tensors, first in, first out. Whether the tensors of a single call fit into the cache would
    be simpler, and calls the step of a network of many layers `compute` whose weights are larger than the cache together
    ("MLP of large weights, batch 4" in `benchmarks/causes.py`), and that of an optimizer that takes one tensor after the other.

    Args:
        capacity: bytes of the cache; None is a cache that holds nothing.
    """

    def __init__(self, capacity: int | None):
        self._capacity = capacity or 0
        self._come = 0  # bytes so far
        self._came: dict[tuple[int, int], int] = {}  # a place → what had come when it did

    def cold_bytes(self, tensor: Tensor, size: int, is_new: bool = False) -> int:
        """Of the `size` bytes that a call touches of a tensor, those from main memory; `is_new` of one that the call makes."""
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() <= self._capacity  # the cache holds all of it, or nothing
        where = address(storage), 0 if is_small else int(tensor.storage_offset())
        came = self._came.get(where)
        if came is not None and self._come - came + size <= self._capacity:
            return 0
        self._come += size
        self._came[where] = self._come
        is_made_here = is_new and came is None and size <= self._capacity  # in the cache, which nothing has left yet
        return 0 if is_made_here else size

    def cold_bytes_of_rows(self, table: Tensor, size: int) -> float:
        """The same of rows at any places of a table: the cache holds at best the part of it that fits."""
        whole = table.untyped_storage().nbytes()
        return size * max(0.0, 1 - self._capacity / whole) if whole else 0.0
