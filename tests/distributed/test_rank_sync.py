"""RankSync: all ranks read the same value at the same batch, within three batches."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from batchscope.distributed.rank_sync import RankSync


class Exchange(list[torch.Tensor]):
    """The tensors of one exchange of two ranks; complete once both have started it."""

    def wait(self) -> None:
        assert len(self) == 2, "a rank waits for one that has not started the same exchange"
        maximum = torch.stack([*self]).amax(0)
        for tensor in self:
            tensor.copy_(maximum)


class Ranks:
    """Two ranks in one process, each with a group that counts its exchanges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.distributed, "new_group", lambda backend: itertools.count())
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)
        self.exchanges: defaultdict[int, Exchange] = defaultdict(Exchange)
        self.batches, self.wants = -1, [0, 0]
        self.syncs = [RankSync(2), RankSync(2)]
        for rank, sync in enumerate(self.syncs):
            sync.contribute("wish", lambda rank=rank: self.wants[rank])

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Iterator[int], async_op: bool) -> Exchange:
        exchange = self.exchanges[next(group)]
        exchange.append(tensor)
        return exchange

    def batch(self, during: Callable[[], Any] = lambda: None) -> list[int]:
        """Run one batch on all ranks; return the value that each reads after the batch."""
        self.batches += 1
        for sync in self.syncs:
            sync.start(self.batches)
            sync.start(self.batches)  # another callback starts the exchange, too
        during()
        return [sync.agreed("wish") for sync in self.syncs]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("before", [2, 99])
def test_all_ranks_know_within_three_batches_with_an_exchange_in_every_second(two: Ranks, rank, before) -> None:
    """The count includes the batch in which one rank begins to want the end."""
    assert [two.batch() for _ in range(before)] == before * [[0, 0]]
    read = [two.batch(lambda: two.wants.__setitem__(rank, 7)), two.batch(), two.batch()]
    assert read == ([[0, 0], [0, 0], [7, 7]] if before == 2 else [[0, 0], [7, 7], [0, 0]])
    assert len(two.exchanges) == (3 if before == 2 else 51)


def test_a_batch_reads_its_own_exchange_alone_and_the_greatest_contribution(two: Ranks) -> None:
    assert two.batch(lambda: two.wants.__setitem__(0, 7)) == [0, 0]  # too late for this one
    assert [two.batch(), two.batch(), two.batch()] == [[0, 0], [7, 7], [0, 0]]
    two.wants[1] = 15
    two.batches += 1
    for sync in two.syncs:
        sync.start(two.batches)  # and is left in the middle
    assert two.batch() == [0, 0]
    assert two.batch() == [15, 15]


def test_one_process_reads_its_own_at_once() -> None:
    alone, wish = RankSync(1), [0]
    alone.contribute("wish", lambda: wish[0])
    alone.start(1)
    wish[0] = 7
    assert (alone.agreed("wish"), alone.maximum(3)) == (7, 3)


def test_closing_leaves_an_exchange_behind_and_destroys_the_group_once(two: Ranks, monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy := Mock())
    trainer = Mock(world_size=2)
    RankSync.of(trainer).start(1)
    assert RankSync.of(trainer) is RankSync.of(trainer)
    RankSync.close(trainer)
    RankSync.close(trainer)  # another callback does as well
    destroy.assert_called_once()
