"""The utilization of each device by a training, by batch size: samples/s and MFU, measured here and predicted on cards.

MFU is the time of a step's FLOPs at the peaks of their precisions, over the time of the step. The peaks are measured for a device
that is here, and those of the datasheet for a card.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UserError
from ..hardware.datasheet import Datasheet
from ..records.values import table
from .crossing import Line, crossing_text, crossings, threshold_crossing
from .interval import Interval, digits, time_ratio
from .measured import Training
from .rows import Question, rows_by_size
from .scale import rows_at
from .work import adapt_to_device, expand_row


@dataclass(frozen=True)
class UseLine(Line):
    """The rates of a device by batch size; of a card only the sizes that surely fit in its memory."""

    rates: Mapping[int, Interval]  # samples/s
    shares: Mapping[int, Interval]  # MFU; empty if a peak or the FLOPs are unknown
    memory_ends: bool  # whether a larger size may not fit


def use_lines(training: Training, question: Question) -> list[UseLine]:
    """Return the lines of all devices that can train: the CPU, other devices that are here, and the cards of the question."""
    measured_devices = [source.device for source in training.sources]
    lines = []
    for device in [*measured_devices, *(card for card in question.cards if card not in measured_devices)]:
        with contextlib.suppress(UserError):  # a card without hardware for the precision
            lines.append(_make_line(training, device, question))
    return sorted((line for line in lines if line.times), key=lambda line: line.label != "cpu")


def _make_line(training: Training, device: Datasheet, question: Question) -> UseLine:
    rows = rows_by_size(training, device, question, 1)
    times = {size: row.step.seconds for size, row in rows.items() if not row.shortage}
    source = next((source for source in training.sources if source.device is device), None)
    recorded = source or training.sources[0]
    steps = {size: measured.step for size, measured in recorded.sizes.items()}
    precision = None if source or question.precision == training.precision else question.precision
    calibrations = [step.calibration for step in steps.values() if not step.calibration.get("disturbed")]  # low peaks
    measured = table(calibrations[0].get("matmul_flops_per_sec") if calibrations else None)
    valid = {name: peak for name, peak in measured.items() if isinstance(peak, int | float) and 0 < peak < math.inf}
    peaks = valid if source else device.flops_per_sec
    shares = {}
    with contextlib.suppress(KeyError, UserError):  # an unknown peak
        for size, seconds in times.items() if training.has_all_flops else ():
            works = [work for row in rows_at(steps, size) for work in expand_row(row) if work.flops]
            sheet = replace(device, flops_per_sec=peaks)
            works = [adapt_to_device(work, sheet, precision, recorded.device.kind) for work in works]
            if least_s := sum(work.calls * work.flops / peaks[work.precision] for work in works):
                shares[size] = _divide(least_s, seconds)
    rates = {size: _divide(size, seconds) for size, seconds in times.items()}
    return UseLine(device.short[0], source is not None, times, rates, shares, len(times) < len(rows))


def _divide(amount: float, seconds: Interval) -> Interval:
    return Interval(*(amount / max(end, 1e-12) for end in reversed(seconds.ends())))


def use_sentence(lines: Sequence[UseLine], size: int | None = None) -> str:
    """Return a sentence about the fastest other device: its utilization at a size (the smallest by default) and its crossing."""
    size = size or min(lines[0].times)
    others = [line for line in lines[1:] if size in line.shares]
    if not others:
        return ""
    line = max(others, key=lambda line: max(rate.middle for rate in line.rates.values()))
    half_full, crossing = threshold_crossing(line.shares, ("high", "middle", "low"), 0.5), crossings(lines)[line.label]
    percentages = {size: f"{digits(100 * share.middle)} %" for size, share in line.shares.items()}
    utilization = f"{'probably ' if half_full.high else ''}at least half full at every size"
    if not math.isfinite(half_full.middle):
        largest, source = max(percentages), "measured" if line.here else "predicted"
        utilization = f"{percentages[largest]} at {largest:,}, the largest size {source}"
    elif half_full.middle:
        utilization = f"half full from about {crossing_text(half_full)}"
    from_size = f"at {'no' if crossing.middle else 'every'} size"
    if 0 < crossing.middle < math.inf:
        from_size = f"from about {crossing_text(crossing)}"
    likely = "probably " if crossing.middle in (0, math.inf) and crossing.low < crossing.high else ""
    surely = f", surely from about {digits(crossing.high)} on" if likely and math.isfinite(crossing.high) else ""
    faster = f"it is {likely}faster than {lines[0].name} {from_size}{surely}"
    if math.isfinite(crossing.middle):
        largest = max(lines[0].times.keys() & line.times.keys())
        ratio = time_ratio(lines[0].times[largest], line.times[largest])
        faster += f", {digits(ratio.value)} times at {largest:,} ({digits(ratio.low)} to {digits(ratio.high)})"
    sentence = f"{line.name} is {percentages[size]} used at {size:,}, and {utilization}; {faster}."
    return f"{sentence[0].upper()}{sentence[1:]}"
