"""What a user says of time and money: a deadline, a budget, and what an hour on a device costs.

A price is what somebody takes for an hour today, so none is a part of this package. The user gives prices one by one, or
in a YAML file that says whose they are and of which day (docs/prices.yaml is an example).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from ..files import why
from .words import digits

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PER_HOUR = {"h": 1.0, "hour": 1.0, "min": 60.0, "s": 3600.0, "d": 1 / 24, "day": 1 / 24}
_LONGEST_S = 100 * 365 * 86400.0
_LEAST, _MOST = 1e-6, 1e9  # of an amount, to be one and not a slip of the keys
_CURRENCY = r"([$€£]|[A-Z]{3})?"
_LARGEST_FILE = 2**20  # bytes


@dataclass(frozen=True)
class Amount:
    """An amount of money; the currency is empty where the user names none."""

    value: float
    currency: str = ""


@dataclass(frozen=True)
class Prices:
    """What an hour on each device costs, and whose prices these are."""

    per_hour: Mapping[str, float]  # by the device's name, or by `cpu` and the like for one that is here
    currency: str = ""
    source: str = ""  # of a file: whose, and of which day

    def text(self, value: float) -> str:
        """An amount in the currency of these prices: `$0.05`, `12 EUR`."""
        number = f"{value:,.0f}" if value >= 100 else digits(value).removesuffix(".0")
        return f"{self.currency}{number}" if len(self.currency) == 1 else f"{number} {self.currency}".rstrip()


def seconds(text: str) -> float:
    """A time with its unit: `90s`, `30min`, `2h`, `1h30m`, `1.5d`. Raises ValueError, with what is taken."""
    parts = re.findall(rf"{_NUMBER}\s*(sec|s|min|m|h|d)", text)
    rest = re.sub(rf"{_NUMBER}\s*(sec|s|min|m|h|d)\s*", "", text.strip())
    found = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if rest or not parts or not 0 < found <= _LONGEST_S:
        raise ValueError(f"takes a time above 0 with its unit, such as 30min or 2h, got {text!r}")
    return found


def seconds_or_0(text: str) -> float:
    """The same, and `0`."""
    return 0.0 if re.fullmatch(r"0\s*(s|min|h)?", text.strip()) else seconds(text)


def amount(text: str) -> Amount:
    """An amount above 0, in a currency or none: `5`, `$5`, `5 EUR`. Raises ValueError, with what is taken."""
    found = re.fullmatch(rf"{_CURRENCY}\s*{_NUMBER}\s*{_CURRENCY}", text.strip())
    value = float(found[2]) if found else 0.0
    if found is None or not _LEAST <= value <= _MOST or (found[1] and found[3]):
        raise ValueError(f"takes an amount of money above 0 and up to a billion, such as 5 or $5, got {text!r}")
    return Amount(value, found[1] or found[3] or "")


def price(text: str) -> tuple[str, Amount]:
    """`h100=2.5/h`: a device, and what an hour on it costs. Raises ValueError, with what is taken."""
    name, equals, rest = text.partition("=")
    number, slash, unit = rest.partition("/")
    if not name.strip() or not equals:
        raise ValueError(f"takes a device and its price, such as h100=2.5/h, got {text!r}")
    if not slash or unit.strip() not in _PER_HOUR:
        what = f"the unit {unit.strip()!r}" if slash else "no unit"
        raise ValueError(f"takes a price for a time, such as {name.strip()}=2.5/h, and {text!r} has {what}")
    found = amount(number)
    return name.strip().lower(), Amount(found.value * _PER_HOUR[unit.strip()], found.currency)


def read_prices(path: Path) -> tuple[dict[str, Amount], str]:
    """The prices of a YAML file by device, and whose they are.

    The file holds `date` and `source`, `currency` where it wants one, and `per_hour`: an amount for each device.

    Raises:
        UserError: for a file that cannot be read, holds no prices, or does not say whose they are and of which day.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE)
        found: Any = yaml.safe_load(text.decode())
    except OSError as error:
        raise UserError(f"--prices: {path} cannot be read: {why(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"--prices: {path} is not a YAML file: {str(error).partition(chr(10))[0]}") from error
    known = found if isinstance(found, dict) else {}
    table, source, day, currency = (known.get(key) for key in ("per_hour", "source", "date", "currency"))
    if not isinstance(table, dict) or not table:
        raise UserError(f"--prices: {path} has no table `per_hour`, such as per_hour: {{t4: 0.5}}")
    if not isinstance(source, str) or not source.strip() or not isinstance(day, date | str | int):
        raise UserError(f"--prices: {path} has to say whose prices these are, and of which day: `source` and `date`")
    prices = {}
    for name, value in table.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not _LEAST <= value <= _MOST:
            raise UserError(f"--prices: {path}: {name}: takes an amount above 0 for an hour, got {value!r}")
        prices[str(name).lower()] = Amount(float(value), str(currency or ""))
    return prices, f"{source.strip()}, {day}"


def collect(
    single: Iterable[tuple[str, Amount]],
    file: tuple[Mapping[str, Amount], str] | None,
    budget: Amount | None,
    known: Callable[[str], str],
) -> Prices:
    """All prices in one currency; a single one replaces that of the file.

    Args:
        single: as `price` gives them, one for a device.
        file: as `read_prices` gives it.
        budget: has to be in the same currency.
        known: a device's name as the tables have it; raises UserError for an unknown one.
    """
    of_file, source = file or ({}, "")
    ours: dict[str, Amount] = {}
    for name, one in single:
        if (device := known(name)) in ours:
            raise UserError(f"--price: {name} has two prices")
        ours[device] = one
    merged = {known(name): value for name, value in of_file.items()} | ours
    currencies = {one.currency for one in (*merged.values(), *([budget] if budget else [])) if one.currency}
    if len(currencies) > 1:
        raise UserError(f"--price, --budget: amounts in {' and in '.join(sorted(currencies))} cannot be compared")
    return Prices({name: one.value for name, one in merged.items()}, next(iter(currencies), ""), source)
