"""Which bytes move through main memory: least recently used, whole tensors, by address."""

import pytest

from batchscope.hardware.cache_model import CacheModel

A, B, C = 1000, 2000, 3000  # addresses of storages


@pytest.fixture
def cache() -> CacheModel:
    """A cache of 100 bytes."""
    return CacheModel(100)


def use(cache: CacheModel, storage: int, size: int, offset: int = 0, whole: int | None = None) -> int:
    return cache.use(storage, offset, whole or size, size)


def test_the_first_use_moves_all_bytes_and_the_second_none(cache):
    assert [use(cache, A, 60), use(cache, A, 60)] == [60, 0]


def test_what_was_used_longest_ago_makes_room(cache):
    use(cache, A, 60)
    use(cache, B, 60)
    assert use(cache, A, 60) == 60


def test_a_use_makes_a_tensor_the_latest(cache):
    use(cache, A, 40)
    use(cache, B, 40)
    use(cache, A, 40)
    use(cache, C, 40)
    assert [use(cache, A, 40), use(cache, B, 40)] == [0, 40]


def test_a_tensor_larger_than_the_cache_moves_at_every_use_and_leaves_nothing(cache):
    use(cache, A, 40)
    assert [use(cache, B, 101), use(cache, B, 101), use(cache, A, 40)] == [101, 101, 40]


def test_a_piece_of_a_held_storage_moves_nothing(cache):
    use(cache, A, 60)
    assert use(cache, A, 20, offset=40, whole=60) == 0


def test_a_piece_of_a_held_storage_takes_no_room_of_its_own(cache):
    use(cache, A, 60)
    use(cache, A, 20, offset=20, whole=60)
    use(cache, B, 40)
    assert use(cache, A, 60) == 0


def test_pieces_add_up_to_the_whole(cache):
    use(cache, A, 20, offset=0, whole=60)
    use(cache, A, 20, offset=20, whole=60)
    assert use(cache, A, 60) == 20
    assert use(cache, A, 60) == 0


def test_no_cache_holds_nothing():
    cache = CacheModel(None)
    assert [use(cache, A, 8), use(cache, A, 8)] == [8, 8]
