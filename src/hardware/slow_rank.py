"""The rank that the other ranks wait for, and the part of its step in which it is slow.

Ranks that train together synchronize in every backward pass, so their steps take equally long: a fast rank waits there for a
slow one. Only the parts without synchronization differ: the wait for the loader, the copy of the batch, and the computation
without waits for other ranks.

A rank is slow in a part if it surely spends more time there than the median of the other ranks, by more than `LEAST` of the
step. The steps are divided into `BLOCKS` successive blocks, and the mean difference of the blocks has a one-sided interval by
Student's t. A rank that is slow only in some blocks has a wide interval. The confidence holds for all ranks and parts
simultaneously.

Some waits for other ranks cannot be measured: in `training_step` a rank may wait itself (`sync_dist`, SyncBatchNorm), which
counts as computing. No rank waits for others in its loader. So a rank that computes longer is slow only if all its parts together
take longer, too. A rank with a slow loader is `probable` if the other ranks seem to compute meanwhile.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from ..records.formatting import duration
from .advice import Setting, change_for

# Times of a rank in a step: `input_ms`, `transfer_ms` and `compute_ms` (forward, backward and optimizer, without waits for other
# ranks), each as means over successive blocks of its steps; empty if unknown.
RankTimes = Mapping[str, Sequence[float]]

BLOCKS = 10  # n loader workers make every n-th step long: a block averages over it
LEAST = 0.05  # of the step: a smaller gain is not reported
CONFIDENCE = 0.99  # that no rank is reported if ranks differ by noise alone
_TAKES = {"input": "loader takes", "transfer": "copy to the device takes", "compute": "computing takes"}
_HIDDEN_WAITS = (
    "the others compute for longer, as where training_step itself waits for other ranks (sync_dist, SyncBatchNorm)"
)
_CAUSES = {
    "input": "the size of its samples, its disk, other programs",
    "transfer": "the size of its batches, its link to the device",
    "compute": "its samples and their lengths, the clock of its device, other programs, code that runs on this rank alone",
}


def block_means(values: ArrayLike) -> list[float]:
    """Return the means of `BLOCKS` successive blocks of values, shape (N,); the values themselves if they are fewer."""
    array = numpy.asarray(values, float)
    return [float(block.mean()) for block in numpy.array_split(array, min(BLOCKS, len(array)) or 1) if len(block)]


def part_means(ranks: Sequence[RankTimes]) -> dict[str, list[float]]:
    """Return the mean milliseconds of each part on each rank, without parts that are unknown on a rank."""
    return {part: ms.mean(1).tolist() for part, ms in _ms_by_part(ranks).items()}


def _ms_by_part(ranks: Sequence[RankTimes]) -> dict[str, NDArray[numpy.float64]]:
    """Return the milliseconds of each part that is known on all ranks, shape (ranks, blocks)."""
    parts = {part: [rank[f"{part}_ms"] for rank in ranks] for part in _TAKES}
    return {part: numpy.array(ms, float) for part, ms in parts.items() if all(ms) and len({*map(len, ms)}) == 1}


def find_slow_rank(ranks: Sequence[RankTimes], step_ms: float, setting: Setting) -> dict[str, Any] | None:
    """Return the rank that the others wait for, by the rule above; None if no rank is slow, or the parts are unknown.

    The result has the `rank` and the `part` (`input`, `transfer` or `compute`) with the largest excess, its `ms` in a mean step,
    `excess_ms` beyond the median of the other ranks, `share`: the excess as a share of the step, `certainty` (`clear` or `probable`),
    `evidence`: one line with these numbers, and `advice`: what to inspect, or to change.

    Args:
        ranks: the times of all ranks that train together.
        step_ms: the time of the mean step.
        setting: the options of the run, for the advice.
    """
    parts = _ms_by_part(ranks)
    if len(ranks) < 2 or not parts or not step_ms > 0 or any(ms.shape[1] < BLOCKS for ms in parts.values()):
        return None
    num_tests, least_ms = len(ranks) * len(parts), LEAST * step_ms
    excess = {part: _excess_ms(ms) for part, ms in parts.items()}
    total_excess = _excess_ms(numpy.sum([*parts.values()], 0))
    is_slow = {part: _lower_bounds(ms, num_tests) > least_ms for part, ms in excess.items()}
    if "compute" in is_slow:
        is_slow["compute"] &= _lower_bounds(total_excess, num_tests) > least_ms
    slow_parts = [
        (float(excess[part][rank].mean()), part, int(rank)) for part in parts for rank in is_slow[part].nonzero()[0]
    ]
    if not slow_parts:
        return None
    excess_ms, part, rank = max(slow_parts)
    ms, is_hidden = float(parts[part][rank].mean()), float(total_excess[rank].mean()) < excess_ms / 2
    others = f"rank {1 - rank}, which waits for it" if len(ranks) == 2 else "the median of the others, which wait"
    evidence = f"rank {rank} is {'probably ' if is_hidden else ''}slow: its {_TAKES[part]} {duration(ms / 1e3)} a step"
    evidence += f", {duration(excess_ms / 1e3)} more than {others}" + (f"; {_HIDDEN_WAITS}" if is_hidden else "")
    return {
        "rank": rank,
        "part": part,
        "ms": ms,
        "excess_ms": excess_ms,
        "share": excess_ms / step_ms,
        "certainty": "probable" if is_hidden else "clear",
        "evidence": evidence,
        "advice": _advice(part, setting),
    }


def _advice(part: str, setting: Setting) -> str:
    change = change_for(part, setting) if part != "compute" else None
    advice = f"see what differs there: {_CAUSES[part]}"
    return f"{advice}; {' '.join(change)}" if change else advice


def _excess_ms(ms: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Return the time of each rank beyond the median of the other ranks, in each block: shape (ranks, blocks)."""
    return numpy.array([ms[rank] - numpy.median(numpy.delete(ms, rank, 0), 0) for rank in range(len(ms))])


def _lower_bounds(ms: NDArray[numpy.float64], num_tests: int) -> NDArray[numpy.float64]:
    """Return the lower bound of each rank's mean over blocks, simultaneous over `num_tests` bounds: shape (ranks,)."""
    t = stdtrit(BLOCKS - 1, 1 - (1 - CONFIDENCE) / num_tests)
    return ms.mean(1) - t * ms.std(1, ddof=1) / BLOCKS**0.5
