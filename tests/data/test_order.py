"""DeterministicBatchSampler: an order that is a function of (seed, epoch) alone, shared by any number of ranks."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

from batchscope.data import order
from batchscope.data.order import DeterministicBatchSampler


def indices(batches: DeterministicBatchSampler) -> list[list[int]]:
    """The samples of each batch, without the epoch that a key has, too."""
    return [found for _, found in batches]


def joined(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(order, "rank_and_world_size", lambda: (rank, world))


def shares(
    monkeypatch: pytest.MonkeyPatch, num: int, batch_size: int, world: int, **options: Any
) -> list[list[list[int]]]:
    """The batches of every rank of a world, one list a rank."""
    found = []
    for rank in range(world):
        as_rank(monkeypatch, rank, world)
        batches = DeterministicBatchSampler(num, batch_size, shuffle=True, seed=1, **options)
        batches.set_epoch(2)
        found.append(indices(batches))
        assert len(batches) == len(found[-1])
    return found


def global_batches(ranks: list[list[list[int]]]) -> list[list[int]]:
    return [joined(parts) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("num", "batch_size", "batches"), [(10, 5, 2), (11, 5, 3), (3, 5, 1), (1, 1, 1)])
def test_the_number_of_batches_is_rounded_up(num: int, batch_size: int, batches: int) -> None:
    assert len(DeterministicBatchSampler(num, batch_size, shuffle=True)) == batches


def test_every_pair_of_seed_and_epoch_has_an_order_of_its_own() -> None:
    seeds = [0, 1, 2, 255, 256, 257, 1 << 24, (1 << 32) - 1]
    orders = set()
    for seed in seeds:
        batches = DeterministicBatchSampler(50, 8, shuffle=True, seed=seed)
        for epoch in range(5):
            batches.set_epoch(epoch)
            orders.add(tuple(batches.order().tolist()))
    assert len(orders) == len(seeds) * 5


def test_a_batch_can_be_asked_which_samples_it_holds() -> None:
    batches = DeterministicBatchSampler(50, 8, shuffle=True)
    batches.set_epoch(1)
    assert [batches.samples(batch) for batch in range(len(batches))] == indices(batches)


@pytest.mark.parametrize("num", [96, 97, 98, 99, 100, 107, 119])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_samples_of_a_step_are_those_of_one_process(num: int, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = shares(monkeypatch, num, 24, 1)[0]
    if 0 < num % 24 < world:  # a rest too small for all ranks joins the last batch
        alone = [*alone[:-2], alone[-2] + alone[-1]]
    assert global_batches(shares(monkeypatch, num, 24 // world, world)) == alone


@pytest.mark.parametrize("num", [11, 31, 32, 33, 34, 35, 36, 63, 65])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("least", [1, 2])
def test_ranks_have_equally_many_batches_none_too_small_and_no_sample_twice(
    num: int, world: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = shares(monkeypatch, num, 8, world, min_samples=least)
    assert len({len(batches) for batches in ranks}) == 1
    assert min(len(batch) for batches in ranks for batch in batches) >= least
    assert sorted(sample for batches in ranks for batch in batches for sample in batch) == list(range(num))
    for parts in zip(*ranks, strict=True):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("num", "sizes"), [(10, [5, 5]), (11, [5, 6]), (12, [5, 5, 2]), (3, [3])])
def test_a_rest_of_too_few_samples_for_the_model_joins_the_last_batch(num: int, sizes: list[int]) -> None:
    batches, alone = (indices(DeterministicBatchSampler(num, 5, shuffle=True, min_samples=least)) for least in (2, 1))
    assert [len(batch) for batch in batches] == sizes
    assert joined(batches) == joined(alone)


@pytest.mark.parametrize("num", [64, 65, 70, 71])
def test_the_weighted_means_of_the_ranks_average_to_that_of_the_batch(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, weights = shares(monkeypatch, num, 8, 3), []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        batches = DeterministicBatchSampler(num, 8, shuffle=True)
        weights.append([batches.weight(batch) for batch in range(len(batches))])
    for batch, whole in enumerate(global_batches(ranks)):
        means = [sum(own[batch]) / len(own[batch]) * of[batch] for own, of in zip(ranks, weights, strict=True)]
        assert sum(means) / 3 == pytest.approx(sum(whole) / len(whole))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_knows_the_positions_of_its_samples(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = []
    for rank in range(world):
        as_rank(monkeypatch, rank, world)
        batches = DeterministicBatchSampler(200, 24 // world, shuffle=True)
        for batch in range(len(batches)):
            first, count = batches.first_sample(batch), len(batches.samples(batch))
            assert batches.order()[first : first + count].tolist() == batches.samples(batch)
            positions += range(first, first + count)
    assert sorted(positions) == list(range(200))
