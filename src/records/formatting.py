"""Numbers as people read them: the one place that decides how many digits a measured number has.

A measured number gets three significant digits, in terminals, tables, plots and reports alike: more would be noise.
"""

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"))


def significant(value: float) -> str:
    """Three significant digits: `61,200`, `8.43`, `0.0123`."""
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:#.3g}".rstrip(".")


def with_prefix(value: float, unit: str = "") -> str:
    """Three significant digits and an SI prefix: `10.3 TFLOP/s`, `0.9 mJ`."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def percent(fraction: float, digits: int = 0) -> str:
    """A fraction as a percentage: `35 %`."""
    return f"{100 * fraction:.{digits}f} %"


def duration(seconds: float) -> str:
    """A time span with the unit that suits it: `3.2 ms`, `45 s`, `12 min`, `1.5 h`."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count(number: int, noun: str) -> str:
    """A number and its noun: `1 step`, `1,200 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
