"""Memory that grows is told from memory that is noisy, fills once, or comes in steps."""

import numpy
import pytest

from batchscope.hardware.growth import growth

TIMES = numpy.arange(0.0, 1800.0, 0.25)  # half an hour at four samples a second
REPEATED = 200


def noise(seed: int, gib: float = 0.005) -> numpy.ndarray:
    return numpy.random.default_rng(seed).normal(0, gib, len(TIMES))


def test_a_leak_is_found_with_its_rate_below_what_a_collector_frees_and_validations_hold() -> None:
    collected = 0.3 * (TIMES % 37) / 37
    validated = 1.5 * (TIMES % 300 < 20)
    for seed in range(REPEATED // 10):
        rate = growth(TIMES, 2 + 1e-4 * TIMES + collected + validated + noise(seed))
        assert rate == pytest.approx(1e-4, rel=0.25)


def walk(seed: int) -> numpy.ndarray:
    """A random walk: the memory of an allocator that frees its blocks in no order."""
    return 4 + numpy.cumsum(numpy.random.default_rng(seed).normal(0, 0.002, len(TIMES)))


def steps(seed: int) -> numpy.ndarray:
    """Memory that grows in three steps: for a checkpoint, a first validation, a figure."""
    at = numpy.random.default_rng(seed).uniform(0, TIMES[-1], 3)
    return 4 + 0.2 * (TIMES[:, None] > at).sum(1) + noise(seed)


ORDINARY = {
    "noise": lambda seed: 4 + noise(seed),
    "a cache that fills": lambda seed: 4 + 3 * (1 - numpy.exp(-TIMES / 400)) + noise(seed),
    "an epoch that is read into memory": lambda seed: 4 + 3 * numpy.minimum(TIMES / 900, 1) + noise(seed),
    "some steps": steps,
    "falling": lambda seed: 6 - 1e-3 * TIMES + noise(seed),
    "a drop at the end": lambda seed: 4 + 1e-3 * TIMES * (TIMES < 1500) + noise(seed),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_runs_raise_no_alarm(kind: str) -> None:
    assert [seed for seed in range(REPEATED) if growth(TIMES, ORDINARY[kind](seed))] == []


def test_a_random_walk_hardly_ever_raises_one() -> None:
    assert sum(growth(TIMES, walk(seed)) is not None for seed in range(REPEATED)) <= 2


def test_what_is_short_small_or_has_a_gap_is_not_judged() -> None:
    rising = 2 + 1e-3 * TIMES
    assert growth(TIMES, rising) is not None
    assert growth(TIMES[:240], rising[:240]) is None  # a minute, with its warm-up
    assert growth(TIMES, 2 + 1e-3 * rising) is None
    gap = (TIMES < 700) | (TIMES > 1000)
    assert growth(TIMES[gap], rising[gap]) is None
    assert growth([], []) is None
