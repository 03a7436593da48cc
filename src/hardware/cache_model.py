"""Which bytes of an operation move through main memory, and which stay in the device's cache.

The rule: the cache holds the tensors that were used last, as long as their sizes add up to at most its capacity (least
recently used, whole tensors, fully associative). A read or a write of a tensor that the cache holds moves nothing. Any
other read or write moves the tensor once. A tensor larger than the cache moves at every use, and leaves nothing in it.

The rule is kinder than a real cache, which shares its lines with code, with other processes and with other addresses, so
the moved bytes are a lower bound for tensors that fit. Tensors are known by their addresses: memory that an allocator
gives out again is still in the cache. Rows at any places of a table are in the cache by the part of the table that fits.
"""

from collections import OrderedDict

Place = tuple[int, int]  # the address of a storage, and the offset in it in bytes


class CacheModel:
    """A cache of so many bytes; None is a cache that holds nothing."""

    def __init__(self, capacity: int | None):
        self._capacity = capacity or 0
        self._held: OrderedDict[Place, int] = OrderedDict()  # least recently used first → bytes
        self._offsets: dict[int, set[int]] = {}  # of each storage that is held
        self._total = 0

    def use(self, storage: int, offset: int, storage_size: int, size: int) -> int:
        """Read or write `size` bytes at an offset of a storage; returns the bytes that move through main memory."""
        hit = self._hit(storage, offset, size, storage_size)
        if hit == size:
            return 0
        if size > self._capacity:
            self._held.clear()
            self._offsets.clear()
            self._total = 0
        else:
            self._keep(storage, offset, size, whole=size >= storage_size)
        return size - hit

    def use_rows(self, storage_size: int, size: int) -> float:
        """Read or write `size` bytes at any places of a storage; the cache holds the part of it that fits, at best."""
        return size * max(0.0, 1 - self._capacity / storage_size) if storage_size else 0.0

    def _hit(self, storage: int, offset: int, size: int, storage_size: int) -> int:
        offsets = self._offsets.get(storage)
        if not offsets:
            return 0
        if self._held.get((storage, offset), 0) >= size:
            self._held.move_to_end((storage, offset))
            return size
        if self._held.get((storage, 0), 0) >= offset + size:
            self._held.move_to_end((storage, 0))
            return size
        if size >= storage_size:  # the whole of what was used in pieces
            return min(size, sum(self._held[storage, each] for each in offsets))
        return 0

    def _keep(self, storage: int, offset: int, size: int, whole: bool) -> None:
        for each in list(self._offsets.get(storage, ())) if whole else [offset]:
            size = max(size, self._drop(storage, each))
        self._held[storage, offset] = size
        self._offsets.setdefault(storage, set()).add(offset)
        self._total += size
        while self._total > self._capacity:
            self._drop(*next(iter(self._held)))

    def _drop(self, storage: int, offset: int) -> int:
        """Remove a place; returns its bytes, 0 if it is not held."""
        size = self._held.pop((storage, offset), 0)
        self._total -= size
        offsets = self._offsets.get(storage, set())
        offsets.discard(offset)
        if not offsets:
            self._offsets.pop(storage, None)
        return size
