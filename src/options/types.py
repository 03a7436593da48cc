"""The kinds of value an option can take, declared where the option is: in the signature of what it configures.

`batch_size: PositiveInt` in a constructor is all the declaration that an option needs: the configuration is checked
against the signature before anything heavy is imported (see schema.py).
"""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """The bounds of a number; `open_low` leaves the lower bound itself out."""

    low: float
    high: float | None = None
    open_low: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies within the bounds; NaN never does."""
        above = value > self.low if self.open_low else value >= self.low
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is not None and self.open_low:
            return f"above {_plain(self.low)}, at most {_plain(self.high)}"
        if self.high is not None:
            return f"from {_plain(self.low)} to {_plain(self.high)}"
        return f"above {self.low:g}" if self.open_low else f"of at least {self.low:g}"


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


INT64 = 2**63 - 1  # torch's largest whole number, and so that of every option
PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, open_low=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]  # what every random generator in use can be seeded with
