"""Intervals in words and cells: two digits for what was predicted, and a bound never looks like a prediction."""

import math
from collections.abc import Sequence

from .seconds import Interval

_UNITS = ((2 * 86400, 86400, "d"), (5400, 3600, "h"), (90, 60, "min"), (1, 1, "s"), (0, 1e-3, "ms"))
_DASH = "–"


def digits(value: float, count: int = 2) -> str:
    """A number with so many significant digits: `24,000`, `2.1`, `0.015`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{count}g}")
    after = max(0, count - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{after}f}"


def time(seconds: Interval, bound: bool = False, between: str = _DASH, count: int = 2) -> str:
    """A time with its interval: `2.1–4.0 min`, `49 s`; of a bound `≥ 12 s`."""
    lead = seconds.low if bound else seconds.middle
    factor, unit = next((factor, unit) for least, factor, unit in _UNITS if lead >= least)
    if bound:
        return f"≥ {digits(seconds.low / factor, count)} {unit}"
    return f"{span(seconds.low / factor, seconds.high / factor, between, count)} {unit}"


def span(low: float, high: float, between: str = _DASH, count: int = 2) -> str:
    """Two ends of an interval as one text; one number where both are written alike."""
    first, last = digits(low, count), digits(high, count)
    return first if first == last else f"{first}{between}{last}"


def one_time(seconds: float) -> str:
    """A time that is known: `5 min`, `100 s`, `2 h`."""
    whole = (f"{seconds / factor:.0f} {unit}" for _, factor, unit in _UNITS if seconds / factor in range(2, 200))
    factor, unit = next((factor, unit) for least, factor, unit in _UNITS if seconds >= least)
    return next(whole, f"{float(f'{seconds / factor:.3g}'):g} {unit}")


def listed(names: Sequence[str], last: str = "and") -> str:
    """`T4, L4 and H100`."""
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else "".join(names)


def title_of(label: str, here: bool = False) -> str:
    """What a sentence calls a device: `the CPU here`, `T4`."""
    kind, _, number = label.partition(" ")
    own = {"cpu": "the CPU", "cuda": "the GPU", "mps": "the GPU", "rocm": "the GPU"}.get(kind, kind.upper())
    return f"{own}{f' {number}' if number else ''}{' here' if here else ''}"


def sentence(text: str) -> str:
    """The text with a capital at its beginning and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
