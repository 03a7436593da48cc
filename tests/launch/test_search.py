"""The search for a batch size: close to what trying every size would find, in a handful of runs."""

import pytest

from batchscope.launch.search import BatchSizeSearch

POWERS = [2**k for k in range(3, 15)]


def device(floor: float, slope: float, memory: int = 2**40, samples: int = 2**40):
    """Samples/s of a device whose step takes floor + slope · batch seconds; None where the batch does not fit."""

    def rate(size: int) -> float | None:
        return size / (floor + slope * size) if size <= min(memory, samples) else None

    return rate


def recorded(rate):
    """The measure to search with, and the list of what it was asked for."""
    asked: list[int] = []

    def measure(size: int) -> float | None:
        asked.append(size)
        return rate(size)

    return measure, asked


@pytest.mark.parametrize("knee", [2**k for k in range(10)])
def test_it_finds_what_an_exhaustive_sweep_would_recommend_within_a_step_of_two(knee: int):
    rate = device(floor=1e-6 * knee, slope=1e-6)
    best = max(rate(size) for size in POWERS)
    exhaustive = min(size for size in POWERS if rate(size) >= 0.95 * best)
    measure, asked = recorded(rate)
    found = BatchSizeSearch().find(measure)
    assert found in asked
    assert exhaustive / 2 <= found <= exhaustive * 2
    assert len(asked) <= 8


def test_batches_grow_by_four_and_the_size_left_out_below_the_answer_is_tried_last():
    measure, asked = recorded(device(floor=8e-6, slope=1e-6))
    BatchSizeSearch().find(measure)
    assert asked == [8, 32, 128, 512, 64]


def test_where_memory_ends_the_size_below_is_tried():
    measure, asked = recorded(device(floor=1.0, slope=1e-6, memory=300))
    assert BatchSizeSearch().find(measure) == 256
    assert asked == [8, 32, 128, 512, 256]


def test_a_size_that_did_not_run_is_never_the_answer():
    measure, _ = recorded(device(floor=1.0, slope=1e-6, memory=100))
    assert BatchSizeSearch().find(measure) == 64


def test_no_size_that_fits_is_no_answer():
    assert BatchSizeSearch().find(device(1, 1, memory=4)) is None


def test_where_a_larger_batch_is_never_faster_the_first_is_the_answer():
    measure, asked = recorded(device(floor=0, slope=1e-6))
    assert BatchSizeSearch(start=16).find(measure) == 16
    assert asked == [16, 64]


def test_it_stops_at_max_runs_while_throughput_still_rises():
    measure, asked = recorded(device(floor=1e3, slope=1e-9))
    assert BatchSizeSearch(max_runs=3).find(measure) == 128
    assert asked == [8, 32, 128]
