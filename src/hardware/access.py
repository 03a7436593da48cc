"""How an operation accesses a tensor: the bytes that it touches, and whether in the order in which they lie in memory.

A processor moves whole cache lines, and fetches the next ones in advance. Two kinds of access have little of either:

- rows, or single values, at any place of a table: look-ups (`embedding`, `gather`) and updates of rows (`index_add`),
- a walk across the rows: `cumsum(0)` of a matrix, and a copy or an elementwise operation that reads a tensor in another
  order than that of its result, as `x.t().contiguous()` does. The walk comes back to a line after `_FEW` others at least, on a
  stretch that is larger than a core's own cache, and fetches it again.

Such an access is out of order. It may move a line of `LINE` bytes for each of its pieces.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch import storage_id

LINE = 64  # bytes
Order = tuple[int, tuple[int, ...]]  # the number of dimensions of the tensors, and those that are gone along first
_CORE_CACHE = 2**15  # bytes, of a core's own first cache
_FEW = 32  # lines: so many at any distance stay in a core's first cache, and their pages in its address buffer
# Operations that touch some rows of their first argument: as much of it as they return, or as they are given to write.
_LOOK_UPS = ("embedding", "index", "index_select", "gather", "take")
_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")  # they return sums of the rows that they look up
_ROW_UPDATES = ("index_put", "_index_put_impl", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce")
_OF_VALUES = ("gather", "take", "scatter", "scatter_add", "scatter_reduce")  # among both: not of rows
# Operations that go along a dimension, or reduce it, with next to no arithmetic.
_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sum", "mean", "prod", "amax", "amin", "aminmax")
_ALONG += ("max", "min", "argmax", "argmin", "any", "all", "linalg_vector_norm", "norm", "var", "var_mean", "std")
_MOVES = ("_to_copy", "cat", "stack", "repeat", "constant_pad_nd")  # in the order of their result


def is_in_rows(name: str) -> bool:
    """Whether an operation touches some rows of its first argument only."""
    return name in _LOOK_UPS or name in _BAGS or name in _ROW_UPDATES


def follows_result(func: Any, name: str) -> bool:
    """Whether an operation goes through its arguments in the order of its result."""
    in_place = func.overloadpacket.__name__.endswith("_") and not name.startswith(("_foreach", "_fused"))
    return torch.Tag.pointwise in func.tags or name in _MOVES or (in_place and not is_in_rows(name))


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, also those in lists; of a sparse one indices and values, of a nested one values."""
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        yield from (value._indices(), value._values())
    elif isinstance(value, Tensor):
        yield value.values() if value.is_nested else value
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
    """Bytes that reading the tensor touches: whole lines where it has gaps, and what is expanded once."""
    item, whole = tensor.element_size(), tensor.untyped_storage().nbytes()
    piece, pieces = item, 1
    for stride, size in sorted(
        (stride * item, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    ):
        if pieces == 1 and stride == piece:
            piece *= size
        elif pieces == 1 and stride > piece:  # a gap after each piece
            pieces, piece = size, min(-(-piece // LINE) * LINE, stride)
        elif stride:  # pieces of pieces, or pieces that overlap
            pieces *= size
    return min(pieces * piece if tensor.numel() else 0, whole)


def place(tensor: Tensor) -> tuple[int, int, int]:
    """The address of the storage, the offset in it, and its size, in bytes; meta tensors have no address but an identity."""
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return storage.data_ptr() or storage_id(storage), offset, storage.nbytes()


def rows_of(name: str, inputs: Mapping[str, Any], table: Tensor, touched: int) -> tuple[int, int]:
    """The bytes that an operation in rows touches of its table, given those that it returns or writes; those of a row."""
    indices, dim, item = inputs.get("indices"), inputs.get("dim", 0), table.element_size()
    if isinstance(indices, list | tuple):
        dim = max((at for at, each in enumerate(indices) if each is not None), default=0)
    row = item if name in _OF_VALUES else prod(table.shape[dim % max(table.ndim, 1) + 1 :]) * item
    if name in _BAGS and isinstance(indices, Tensor):
        touched = indices.numel() * row
    return min(touched_bytes(table), touched), max(row, item)


def order_of(name: str, inputs: Mapping[str, Any], written: Sequence[Tensor]) -> Order:
    """The order in which an operation goes through its tensors, given those whose order it follows."""
    if name in _ALONG:
        dims, first = inputs.get("dim"), inputs.get("self")
        dims = [dims] if isinstance(dims, int) else dims
        if not dims or not isinstance(first, Tensor) or not all(isinstance(dim, int) for dim in dims):
            return 0, ()
        return first.ndim, tuple(dims)
    if not written:
        return 0, ()
    result = max(written, key=Tensor.numel)
    steps = [
        (stride, dim) for dim, (stride, size) in enumerate(zip(result.stride(), result.shape, strict=True)) if size > 1
    ]
    return result.ndim, (min(steps)[1],) if steps else ()


def is_out_of_order(tensor: Tensor, order: Order) -> bool:
    """Whether the order comes back to a line of the tensor only after the core has lost it."""
    number, dims = order
    if not dims or tensor.ndim != number:
        return False
    steps = [(tensor.stride(dim) * tensor.element_size(), tensor.shape[dim]) for dim in dims]
    lines, stretch = prod(size for _, size in steps), max(step * size for step, size in steps)
    return min(steps)[0] >= LINE and lines > _FEW and stretch > _CORE_CACHE
