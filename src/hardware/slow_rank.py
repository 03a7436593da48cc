"""The rank that the others wait for, and the part of its step in which it is slow.

Ranks that train together meet in every backward pass, so their steps take equally long: a fast rank waits there for a slow
one. Only the parts that a rank spends by itself differ: waiting for its loader, copying its batch, and computing without
the waits for others.

A rank is slow in a part if it spends more there than the median of the other ranks, by more than `LEAST` of the step
and for sure: the steps are divided into `BLOCKS` successive blocks, and the mean difference of the blocks has a one-sided
interval by Student's t. A rank that is slow in some blocks only has a wide interval. The confidence holds for all ranks and
parts together.

Some waits for others cannot be measured: a training step may wait itself (`sync_dist`, SyncBatchNorm), and then seems to
compute. Nobody waits for others in a loader. So a rank that computes more is slow only if all its parts together take
longer, too, and a rank with a slow loader is `probable` where the other ranks seem to compute meanwhile.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from ..records.formatting import duration
from .advice import Setting, change_for

# What a rank spends by itself in `input_ms`, `transfer_ms` and `compute_ms` (forward, backward and optimizer, without waits for
# others) of a step: means of successive blocks of its steps; empty where not known.
RankTimes = Mapping[str, Sequence[float]]

BLOCKS = 10  # a loader's workers make a step in n long: a block averages over it
LEAST = 0.05  # of the step: a smaller gain is not worth a word
CONFIDENCE = 0.99  # that no rank is named among ranks that differ by noise
_TAKES = {"input": "loader takes", "transfer": "copy to the device takes", "compute": "computing takes"}
_HIDDEN = (
    "the others compute for longer, as where training_step itself waits for other ranks (sync_dist, SyncBatchNorm)"
)
_DIFFERS = {
    "input": "the size of its samples, its disk, other programs",
    "transfer": "the size of its batches, its link to the device",
    "compute": "its samples and their lengths, the clock of its device, other programs, code that runs on this rank alone",
}


def block_means(values: ArrayLike) -> list[float]:
    """The means of `BLOCKS` successive blocks of values, shape (N,); the values themselves where they are fewer."""
    series = numpy.asarray(values, float)
    return [float(block.mean()) for block in numpy.array_split(series, min(BLOCKS, len(series)) or 1) if len(block)]


def part_means(ranks: Sequence[RankTimes]) -> dict[str, list[float]]:
    """The milliseconds of each part on each rank; a part that one of them does not know is left out."""
    return {part: ms.mean(1).tolist() for part, ms in _blocks(ranks).items()}


def _blocks(ranks: Sequence[RankTimes]) -> dict[str, NDArray[numpy.float64]]:
    """Of each part that all ranks know the milliseconds, shape (ranks, blocks)."""
    parts = {part: [rank[f"{part}_ms"] for rank in ranks] for part in _TAKES}
    return {part: numpy.array(ms, float) for part, ms in parts.items() if all(ms) and len({*map(len, ms)}) == 1}


def find_slow_rank(ranks: Sequence[RankTimes], step_ms: float, setting: Setting) -> dict[str, Any] | None:
    """The rank that the others wait for, by the rule above; None where no rank is, or its parts are not known.

    It has the `rank` and the `part` (`input`, `transfer` or `compute`) in which any is slowest, the `ms` that it spends there in a
    mean step, `excess_ms` beyond the median of the other ranks, the `share` of the step that this is, `certainty` (`clear` or
    `probable`), `evidence`: one line with these numbers, and `advice`: what to look at, or to change.

    Args:
        ranks: all that train together.
        step_ms: the mean step.
        setting: what the run has set, for the advice.
    """
    parts = _blocks(ranks)
    if len(ranks) < 2 or not parts or not step_ms > 0 or any(ms.shape[1] < BLOCKS for ms in parts.values()):
        return None
    tests, least = len(ranks) * len(parts), LEAST * step_ms
    excess = {part: _beyond_others(ms) for part, ms in parts.items()}
    in_all = _beyond_others(numpy.sum([*parts.values()], 0))
    is_slow = {part: _lower_ends(ms, tests) > least for part, ms in excess.items()}
    if "compute" in is_slow:
        is_slow["compute"] &= _lower_ends(in_all, tests) > least
    slow = [
        (float(excess[part][rank].mean()), part, int(rank)) for part in parts for rank in is_slow[part].nonzero()[0]
    ]
    if not slow:
        return None
    excess_ms, part, rank = max(slow)
    ms, is_hidden = float(parts[part][rank].mean()), float(in_all[rank].mean()) < excess_ms / 2
    others = f"rank {1 - rank}, which waits for it" if len(ranks) == 2 else "the median of the others, which wait"
    words = f"rank {rank} is {'probably ' if is_hidden else ''}slow: its {_TAKES[part]} {duration(ms / 1e3)} a step"
    words += f", {duration(excess_ms / 1e3)} more than {others}" + (f"; {_HIDDEN}" if is_hidden else "")
    return {
        "rank": rank,
        "part": part,
        "ms": ms,
        "excess_ms": excess_ms,
        "share": excess_ms / step_ms,
        "certainty": "probable" if is_hidden else "clear",
        "evidence": words,
        "advice": _advice(part, setting),
    }


def _advice(part: str, setting: Setting) -> str:
    change = change_for(part, setting) if part != "compute" else None
    words = f"see what differs there: {_DIFFERS[part]}"
    return f"{words}; {' '.join(change)}" if change else words


def _beyond_others(ms: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """What each rank spends beyond the median of the others, in each block: shape (ranks, blocks)."""
    return numpy.array([ms[rank] - numpy.median(numpy.delete(ms, rank, 0), 0) for rank in range(len(ms))])


def _lower_ends(ms: NDArray[numpy.float64], tests: int) -> NDArray[numpy.float64]:
    """The lower end of the mean of each row's blocks, of so many that hold together: shape (ranks,)."""
    t = stdtrit(BLOCKS - 1, 1 - (1 - CONFIDENCE) / tests)
    return ms.mean(1) - t * ms.std(1, ddof=1) / BLOCKS**0.5
