"""Which rank the others wait for, and in which part of its step; no rank is named where ranks differ by noise."""

import numpy
import pytest

from batchscope.hardware.advice import Setting
from batchscope.hardware.slow_rank import BLOCKS, RankTimes, block_means, find_slow_rank

STEP_MS = 60.0


def rank(data=12.0, copy=1.0, compute=8.0, jitter=0.0, seed=0) -> RankTimes:
    """The times of a rank whose blocks vary by the factor `jitter`; None: the part was not measured."""
    random = numpy.random.default_rng(seed)
    parts = [[] if ms is None else (ms * (1 + jitter * random.standard_normal(BLOCKS))) for ms in (data, copy, compute)]
    return dict(zip(("input_ms", "transfer_ms", "compute_ms"), map(list, parts), strict=True))


def find(*ranks: RankTimes, step_ms: float = STEP_MS, **setting):
    return find_slow_rank(ranks, step_ms, Setting(**setting))


USUAL = rank()
SLOW = {
    "the loader of one of 2": ([USUAL, rank(data=42)], 1, "input", 42, 30),
    "the loader of one of 4": ([USUAL, USUAL, rank(data=42), USUAL], 2, "input", 42, 30),
    "the computing of one of 2": ([rank(compute=20), USUAL], 0, "compute", 20, 12),
    "the computing of one of 4": ([USUAL, rank(compute=20), USUAL, USUAL], 1, "compute", 20, 12),
    "the copy of one of 2": ([USUAL, rank(copy=9)], 1, "transfer", 9, 8),
    "the loader, of two slow parts": ([USUAL, rank(data=42, compute=20)], 1, "input", 42, 30),
    "a loader behind jitter": ([rank(jitter=0.1, seed=1), rank(data=42, jitter=0.1, seed=2)], 1, "input", 42, 30),
    "a loader where waits are not measured": ([rank(compute=None), rank(data=42, compute=None)], 1, "input", 42, 30),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_slow_rank_is_named_with_its_part_and_what_it_takes_beyond_the_others(case: str) -> None:
    ranks, number, part, ms, excess_ms = SLOW[case]
    verdict = find(*ranks)
    assert (verdict["rank"], verdict["part"], verdict["certainty"]) == (number, part, "clear")
    assert (verdict["ms"], verdict["excess_ms"]) == pytest.approx((ms, excess_ms), rel=0.1)
    assert verdict["share"] == pytest.approx(verdict["excess_ms"] / STEP_MS)


NOBODY = {
    "equal ranks": [USUAL] * 4,
    "equal ranks that jitter": [rank(jitter=0.2, seed=seed) for seed in range(4)],
    "one rank": [rank(data=42)],
    "no rank": [],
    "a difference of less than a twentieth of the step": [USUAL, rank(data=14.9)],
    "a rank that was slow for a tenth of the time": [USUAL, {**USUAL, "input_ms": [*USUAL["input_ms"][1:], 300.0]}],
    "a few steps": [{**USUAL, "input_ms": [12.0] * 9}, {**USUAL, "input_ms": [42.0] * 9}],
    "a rank without values": [USUAL, rank(data=None, copy=None, compute=None)],
    "ranks without values": [rank(data=None, copy=None, compute=None)] * 2,
    "a rank that seems to compute while it waits for a loader": [rank(data=10), rank(data=8, compute=11)],
    "more computing on the rank that loads faster": [rank(data=14, compute=8), rank(data=11.5, compute=12)],
}


@pytest.mark.parametrize("case", NOBODY)
def test_no_rank_is_named_of(case: str) -> None:
    assert find(*NOBODY[case]) is None


def test_no_rank_is_named_where_the_step_has_no_time() -> None:
    assert find(USUAL, rank(data=42), step_ms=0.0) is None


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ranks_that_differ_by_noise_raise_hardly_an_alarm(ranks: int) -> None:
    verdicts = [find(*(rank(jitter=0.3, seed=ranks * run + number) for number in range(ranks))) for run in range(100)]
    assert sum(verdict is not None for verdict in verdicts) <= 2


def test_of_many_ranks_the_noisiest_is_not_slow() -> None:
    verdicts = [find(*(rank(jitter=2.0, seed=64 * run + number) for number in range(64))) for run in range(20)]
    assert not any(verdicts)


def test_the_sentence_has_the_rank_its_part_and_who_waits() -> None:
    start = "rank 1 is slow: its loader takes 42 ms a step, 30 ms more than "
    assert find(USUAL, rank(data=42))["evidence"] == f"{start}rank 0, which waits for it"
    assert find(USUAL, rank(data=42), USUAL)["evidence"] == f"{start}the median of the others, which wait"
    several = [USUAL, rank(data=42), USUAL, rank(data=40), USUAL]
    assert find(*several)["evidence"] == f"{start}the median of the others, which wait"


def test_a_loader_is_probably_slow_where_the_others_seem_to_compute_meanwhile() -> None:
    verdict = find(rank(data=42), rank(compute=38))
    assert (verdict["rank"], verdict["part"], verdict["certainty"]) == (0, "input", "probable")
    assert verdict["evidence"] == (
        "rank 0 is probably slow: its loader takes 42 ms a step, 30 ms more than rank 1, which waits for it; the others "
        "compute for longer, as where training_step itself waits for other ranks (sync_dist, SyncBatchNorm)"
    )


DIFFERS = "see what differs there: the size of its samples, its disk, other programs"
ADVICE = [
    (rank(data=42), {}, DIFFERS),
    (rank(data=42), {"own": False, "num_workers": 0, "cores": 4},
     f"{DIFFERS}; DataLoader(num_workers=2) prepares more batches at the same time"),
    (rank(compute=20), {"faster_precision": "bf16-mixed"},
     ("see what differs there: its samples and their lengths, the clock of its device, other programs, code that runs on "
      "this rank alone")),
    (rank(copy=9), {"device": "cuda"}, "see what differs there: the size of its batches, its link to the device"),
]  # fmt: skip


@pytest.mark.parametrize(("slow", "setting", "words"), ADVICE)
def test_the_advice_is_what_differs_there_and_an_option_that_helps(slow: RankTimes, setting, words: str) -> None:
    assert find(USUAL, slow, pipeline="device" if not setting else None, **setting)["advice"] == words


def test_blocks_are_successive_and_as_equal_as_they_can_be() -> None:
    assert block_means(numpy.arange(20)) == [0.5 + 2 * block for block in range(BLOCKS)]
    assert len(block_means(numpy.arange(23))) == BLOCKS
    assert block_means([3.0, 5.0]) == [3.0, 5.0]
    assert block_means([]) == []
