"""What an option may hold and what it is for, declared in the signature of what it configures.

`batch_size: PositiveInt` or `root: Annotated[str, Purpose.READ_FROM]` in a constructor is all that an option needs: the
configuration is checked against the signature before torch is imported, and `purpose.py` looks the purpose up.
"""

from collections import abc as _abc
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated


class Purpose(Enum):
    """What an option is for. An option without a purpose changes the result."""

    RESULT = auto()
    LENGTH = auto()  # how long the training, or the test, takes
    SPEED = auto()  # hardware and speed; the result stays the same
    READ_FROM = auto()  # a path on this machine that is read
    WRITTEN_TO = auto()  # a path on this machine that is written to
    SEARCH = auto()  # which runs a search does, and how long it lets a run go on without a result
    OBSERVATION = auto()  # what is logged, shown, tested or kept


class Text(Enum):
    """What a text can do. A text without a mark can do anything: only the command line may set it (trust.py)."""

    CHOICE = auto()  # choose among what a library has, name a metric, or give a time


@dataclass(frozen=True)
class Range:
    """The bounds of a number; `open_low` excludes the lower bound."""

    low: float
    high: float | None = None
    open_low: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies within the bounds; NaN never does."""
        above = value > self.low if self.open_low else value >= self.low
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low, high = (f"{n:,}" if isinstance(n, int) else f"{n:g}" for n in (self.low, self.high or 0))
        if self.high is None:
            return f"above {low}" if self.open_low else f"of at least {low}"
        return f"above {low}, at most {high}" if self.open_low else f"from {low} to {high}"


@dataclass(frozen=True)
class Where:
    """An option is read only where another one, given by its full name, has one of these values."""

    option: str
    values: tuple[object, ...]


INT64 = 2**63 - 1  # the largest integer of torch, and so of every option
PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, open_low=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]  # a share, or a probability
Seed = Annotated[int, Range(0, 2**32 - 1)]  # what every random generator in use can be seeded with
Choice = Annotated[str, Text.CHOICE]
Node = Annotated[dict | _abc.Callable, "a node with a _target_"]  # in YAML; a constructor gets what the node builds
