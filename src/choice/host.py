"""A CPU's step with another number of threads: from its operations, their measured seconds, and two calibrations.

An operation's time is the cost of its call, which one thread pays, and the work. Work that torch divides among threads
scales as the roofs that it runs at: arithmetic as the measured peaks, traffic with main memory as the measured bandwidths,
and traffic within the caches as the number of cores. Work that is too small to be divided does not scale: torch gives a
thread 32,768 elements at least (at::internal::GRAIN_SIZE). What a step takes outside of its operations is Python, which has
one thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..records.operations import OperationRow
from ..records.values import number, peak, table
from .kinds import PRODUCTS, works_of
from .measured import Measured
from .seconds import Interval

_GRAIN = 32_768  # elements that torch gives a thread at least
_SMALL_PRODUCT = 50_000.0  # FLOPs: a product that libraries leave to one thread
_CORE_CACHE_BYTES_PER_SEC = 25e9  # of traffic that a core has with its caches, about; only the ratio to the rest counts
_LEAST_CALL_S = 1e-6
_ERROR = 1.2  # of the interval's ends, either way


@dataclass(frozen=True)
class Processor:
    """What a CPU was measured to do with so many threads."""

    threads: int
    flops_per_sec: Mapping[str, float]
    bytes_per_sec: float
    launch_s: float

    @classmethod
    def of(cls, calibration: Mapping[str, Any]) -> "Processor":
        """From a calibration, as operations.json or `batchscope hardware` has it.

        Raises:
            UserError: if it says too little.
        """
        peaks = {key: peak(value) for key, value in table(calibration.get("matmul_flops_per_sec")).items()}
        bandwidth = peak(calibration.get("memory_bytes_per_sec"))
        threads, launch = number(calibration.get("threads")), number(calibration.get("launch_us"))
        if not threads or not bandwidth or not peaks.get("fp32"):
            raise UserError("the processor was not measured with so many threads; batchscope hardware measures it")
        known = {key: value for key, value in peaks.items() if value}
        return cls(round(threads), known, bandwidth, (launch or 1.0) / 1e6)


def predict_threads(
    rows: Sequence[OperationRow], step_s: float, source: Processor, target: Processor, waiting_s: float = 0.0
) -> Interval:
    """Seconds of a step with the target's threads.

    Args:
        rows: of the step, with the seconds that were measured with the source's threads.
        step_s: the whole step there.
        source, target: the same CPU with different numbers of threads.
        waiting_s: of the step, for data; it stays.
    """
    operations = sum(row.seconds for row in rows)
    scale = min(1.0, max(0.0, step_s - waiting_s) / operations) if operations else 1.0  # recording makes a step longer
    moved = sum(_seconds(row, source, target) for row in rows)
    middle = max(0.0, step_s - scale * operations) + scale * moved
    return Interval(middle / _ERROR, middle, middle * _ERROR)


def _seconds(row: OperationRow, source: Processor, target: Processor) -> float:
    """The seconds of a row's calls with the target's threads."""
    calls = max(row.calls, 1e-9)
    fixed = min(row.seconds / calls, max(_LEAST_CALL_S, min(source.launch_s, target.launch_s)))
    before, after = _work(row, source), _work(row, target)
    ratio = after / before if before > 0 else 1.0
    return calls * (fixed + (row.seconds / calls - fixed) * ratio)


def _work(row: OperationRow, processor: Processor) -> float:
    """What the work of a call takes at the roofs, with as many threads as torch divides it among."""
    threads = min(processor.threads, _most_threads(row))
    share = threads / processor.threads
    peak = processor.flops_per_sec.get(row.dtype, processor.flops_per_sec["fp32"])
    calls = max(row.calls, 1e-9)
    arithmetic = row.flops / calls / (peak * share)
    cold = row.cold_bytes / calls / (processor.bytes_per_sec * (share if share < 1 else 1.0))
    warm = (row.bytes - row.cold_bytes) / calls / (_CORE_CACHE_BYTES_PER_SEC * threads)
    return max(arithmetic, cold + warm) if row.flops else cold + warm


def _most_threads(row: OperationRow) -> int:
    """Among how many threads a call can be divided."""
    kinds = {work.kind for work in works_of(row)}
    if kinds & {*PRODUCTS}:
        return max(1, int(row.flops / max(row.calls, 1e-9) // _SMALL_PRODUCT))
    elements = max(_elements(row), default=0)
    return max(1, -(-elements // _GRAIN))


def _elements(row: OperationRow) -> Iterator[int]:
    if len(row.dims) == 2:
        yield row.dims[0] * row.dims[1]
    yield int(row.bytes / max(row.calls, 1e-9) / 12)  # two read, one written


def other_threads(source: Measured, calibration: Mapping[str, Any]) -> dict[int, Interval]:
    """The steps of a training on the same CPU with other threads, by batch size.

    Args:
        source: as it was measured with some threads.
        calibration: of the CPU with the others.

    Raises:
        UserError: if the CPU was not measured with either.
    """
    target, found = Processor.of(calibration), {}
    for size, step in source.steps.items():
        own = Processor.of({"threads": step.threads, **step.calibration})
        seconds, waiting = source.seconds[size].middle, source.waiting[size]
        found[size] = predict_threads(step.rows, seconds, own, target, waiting)
    return found
