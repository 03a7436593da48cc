"""How much of each device a training uses, by batch size: samples/s and MFU, measured here and predicted on cards.

MFU is the time of a step's FLOPs at the peaks of their kinds and precisions over the time of the step. The peaks are
measured for a device that is here, and those of the datasheet for a card.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UserError
from ..hardware.datasheet import Datasheet
from ..records.values import table
from .crossing import Line, crossings, from_on, words
from .interval import Interval, digits, times_longer
from .measured import Training
from .rows import Question, by_size
from .scale import rows_at
from .work import as_computed, works_of


@dataclass(frozen=True)
class UseLine(Line):
    """A device, by batch size; of a card those that surely fit in its memory."""

    rates: Mapping[int, Interval]  # samples/s
    shares: Mapping[int, Interval]  # MFU; empty where a peak or the FLOPs are not known
    memory_ends: bool  # a larger size may not fit


def use_lines(training: Training, question: Question) -> list[UseLine]:
    """Every device that can train it: the CPU, others that are here, and cards."""
    here = [source.device for source in training.sources]
    found = []
    for device in [*here, *(card for card in question.cards if card not in here)]:
        with contextlib.suppress(UserError):  # a card without hardware for the precision
            found.append(_line(training, device, question))
    return sorted((line for line in found if line.times), key=lambda line: line.label != "cpu")


def _line(training: Training, device: Datasheet, question: Question) -> UseLine:
    rows = by_size(training, device, question, 1)
    times = {size: row.step.seconds for size, row in rows.items() if not row.shortage}
    source = next((source for source in training.sources if source.device is device), None)
    recorded = source or training.sources[0]
    steps = {size: measured.step for size, measured in recorded.sizes.items()}
    precision = None if source or question.precision == training.precision else question.precision
    found = [step.calibration for step in steps.values()]
    known = (each.get("matmul_flops_per_sec") for each in found if not each.get("disturbed"))  # which lowers them
    told = table(next(known, None)).items()
    here = {name: peak for name, peak in told if isinstance(peak, int | float) and 0 < peak < math.inf}
    peaks = here if source else device.flops_per_sec
    shares = {}
    with contextlib.suppress(KeyError, UserError):  # a peak that is not known
        for size, seconds in times.items() if training.is_counted else ():
            works = [work for row in rows_at(steps, size) for work in works_of(row) if work.flops]
            computing = replace(device, flops_per_sec=peaks)
            works = [as_computed(work, computing, precision, recorded.device.kind) for work in works]
            if least := sum(work.calls * work.flops / peaks[work.precision] for work in works):
                shares[size] = _per(least, seconds)
    rates = {size: _per(size, seconds) for size, seconds in times.items()}
    return UseLine(device.short[0], source is not None, times, rates, shares, len(times) < len(rows))


def _per(amount: float, seconds: Interval) -> Interval:
    return Interval(*(amount / max(end, 1e-12) for end in reversed(seconds.ends())))


def use_sentence(lines: Sequence[UseLine], size: int | None = None) -> str:
    """How much of the fastest other device is used at a size, the smallest by default, and where and by how much it passes the first."""
    size = size or min(lines[0].times)
    others = [line for line in lines[1:] if size in line.shares]
    if not others:
        return ""
    line = max(others, key=lambda line: max(rate.middle for rate in line.rates.values()))
    half, at = from_on(line.shares, ("high", "middle", "low"), 0.5), crossings(lines)[line.label]
    used = {size: f"{digits(100 * share.middle)} %" for size, share in line.shares.items()}
    likely = "probably " if half.high else ""
    full = f"half full from about {words(half)}" if half.middle else f"{likely}at least half full at every size"
    full = (
        full
        if math.isfinite(half.middle)
        else f"{used[max(used)]} at {max(used):,}, the largest size {'measured' if line.here else 'predicted'}"
    )
    where = f"from about {words(at)}" if 0 < at.middle < math.inf else f"at {'no' if at.middle else 'every'} size"
    likely = "probably " if at.middle in (0, math.inf) and at.low < at.high else ""
    surely = f", surely from about {digits(at.high)} on" if likely and math.isfinite(at.high) else ""
    faster = f"it is {likely}faster than {lines[0].name} {where}{surely}"
    if math.isfinite(at.middle):
        most = max(lines[0].times.keys() & line.times.keys())
        ratio = times_longer(lines[0].times[most], line.times[most])
        faster += f", {digits(ratio.value)} times at {most:,} ({digits(ratio.low)} to {digits(ratio.high)})"
    said = f"{line.name} is {used[size]} used at {size:,}, and {full}; {faster}."
    return f"{said[0].upper()}{said[1:]}"
