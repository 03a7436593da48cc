"""Number formats: the one place that decides how many digits a measured number has.

A measured number has three significant digits in terminals, tables, plots and reports; further digits would be noise.
"""

from typing import Any

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
_PREFIXES += ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_BYTES = ((30, "GiB"), (20, "MiB"), (10, "KiB"))  # powers of two


def significant(value: float) -> str:
    """Format a number with three significant digits: `61,200`, `8.43`, `0.0123`."""
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:#.3g}".rstrip(".")


def with_prefix(value: float, unit: str = "") -> str:
    """Format a number with three significant digits and an SI prefix: `10.3 TFLOP/s`, `0.9 mJ`."""
    value = float(f"{value:.3g}")  # rounded first: 999.9 is 1 k
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def memory(total: float) -> str:
    """Format a number of bytes with the unit that suits it: `1.21 GiB`."""
    exponent, unit = next((e, u) for e, u in _BYTES if total >= 999.5 * 2 ** (e - 10) or e == 10)
    amount = total / 2**exponent
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{significant(amount)} {unit}"


def percent(fraction: float, digits: int = 0) -> str:
    """Format a fraction as a percentage: `35 %`."""
    return f"{100 * fraction:.{digits}f} %"


def duration(seconds: float) -> str:
    """Format a time span with the unit that suits it: `3.2 ms`, `45 s`, `2.5 min`, `12 min`, `1.5 h`."""
    if seconds < 90:
        return with_prefix(seconds, "s")
    if seconds < 5400:
        return f"{seconds / 60:.{1 if seconds < 600 else 0}f}".removesuffix(".0") + " min"
    return f"{seconds / 3600:.1f} h"


def count(number: float, noun: str, plural: str = "") -> str:
    """Format a number with its noun: `1 step`, `1,200 steps`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def option_value(value: Any) -> str:
    """Format the value of an option as on a command line: `true`, `0.004`, `[1,2]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(option_value, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
