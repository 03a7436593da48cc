"""RankSync: all ranks read the same value at the same batch, within three batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from batchscope.distributed import rank_sync
from batchscope.distributed.rank_sync import RankSync


class Exchange:
    """One exchange of all ranks; done when all have started it."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.tensors: list[torch.Tensor] = []
        self.maximum: torch.Tensor | None = None

    def wait(self) -> None:
        assert len(self.tensors) == self.world_size, "a rank waits for one that has not started the same exchange"
        if self.maximum is None:
            self.maximum = torch.stack(self.tensors).amax(0)
        for tensor in self.tensors:
            tensor.copy_(self.maximum)


class Ranks:
    """Several ranks in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int = 2):
        monkeypatch.setattr(rank_sync, "_gloo_group", object)
        self.batches = 0
        self.wants = [0] * world_size
        self.exchanges: list[Exchange] = []
        self.syncs = [RankSync(world_size) for _ in range(world_size)]
        for rank, sync in enumerate(self.syncs):
            sync.contribute("wish", lambda rank=rank: self.wants[rank])
            monkeypatch.setattr(sync, "_exchange", partial(self._exchange, sync, [0]))

    def _exchange(self, sync: RankSync, calls: list[int], numbers: list[int]) -> Exchange:
        calls[0] += 1
        sync._values = torch.tensor(numbers)
        if calls[0] > len(self.exchanges):
            self.exchanges.append(Exchange(len(self.syncs)))
        self.exchanges[calls[0] - 1].tensors.append(sync._values)
        return self.exchanges[calls[0] - 1]

    def batch(self, during: Callable[[], Any] = lambda: None) -> list[int]:
        """One batch on all ranks; what each of them reads after it."""
        self.batches += 1
        for sync in self.syncs:
            sync.start(self.batches)
            sync.start(self.batches)  # as another callback does
        during()
        return [sync.agreed("wish") for sync in self.syncs]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("before", range(5))
def test_all_ranks_know_within_three_batches(two: Ranks, rank: int, before: int) -> None:
    """Counting the batch in which one rank begins to want it."""
    for _ in range(before):
        assert two.batch() == [0, 0]
    read = [two.batch(lambda: two.wants.__setitem__(rank, 7)), two.batch(), two.batch()]
    assert [7, 7] in read
    assert all(one in ([0, 0], [7, 7]) for one in read)


def test_every_second_batch_and_the_first_of_another_kind_has_an_exchange(two: Ranks) -> None:
    for _ in range(100):
        two.batch()
    assert len(two.exchanges) == 50
    for sync in two.syncs:
        sync.restart()
    two.batch()
    assert len(two.exchanges) == 51


def test_a_batch_reads_its_own_exchange_alone_and_the_greatest_contribution(two: Ranks) -> None:
    assert two.batch(lambda: two.wants.__setitem__(0, 7)) == [0, 0]  # too late for this one
    assert [two.batch(), two.batch(), two.batch()] == [[0, 0], [7, 7], [0, 0]]
    two.wants[1] = 15
    for sync in two.syncs:
        sync.start("left in the middle")
    assert two.batch() == [0, 0]
    assert two.batch() == [15, 15]


def test_one_process_reads_its_own_at_once() -> None:
    alone, wish = RankSync(1), [0]
    alone.contribute("wish", lambda: wish[0])
    alone.start(1)
    wish[0] = 7
    assert (alone.agreed("wish"), alone.maximum(3)) == (7, 3)


class Trainer:
    world_size = 2


def test_an_exchange_that_is_not_read_is_left_behind_by_closing() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trainer, groups = Trainer(), torch.distributed.distributed_c10d._world.pg_map
        sync = RankSync.of(trainer)
        assert RankSync.of(trainer) is sync
        sync.start(1)
        assert len(groups) == 2
        RankSync.close(trainer)
        RankSync.close(trainer)  # another callback does as well
        assert len(groups) == 1
    finally:
        torch.distributed.destroy_process_group()
