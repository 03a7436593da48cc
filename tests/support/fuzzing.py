"""What fuzzers share: a budget of time, damage to bytes, and what counts as a good answer to it."""

import contextlib
import io
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from batchscope.errors import UserError

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.15"))  # of each fuzzer
SEED = int(os.environ.get("FUZZ_SEED", "0"))
# What a field of a record from a stranger may hold.
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, math.nan, math.inf, 10**400, "", "x" * 5000, "9" * 5000, "\x1b]0;title\x07\x9b2J\n", "\u202e",
    "</script><script>alert(1)</script>", '"><img src=x onerror=a>', [], [[1]], {}, {"a": {"b": 1}}, "NaN",
)  # fmt: skip


def budget(what: str) -> Iterator[random.Random]:
    """A generator of random numbers a round, for as long as the budget lasts; the same ones for the same seed."""
    end, number = time.monotonic() + SECONDS, 0
    while number < 4 or time.monotonic() < end:
        yield random.Random(f"{what} {SEED} {number}")
        number += 1


def refused_or_fine(what: Callable[[], object], attempt: object) -> None:
    """A UserError of one line, or none: anything else is a fault of the program's."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            what()
    except UserError as error:
        assert str(error) and "\n" not in str(error), attempt
    except Exception as error:
        raise AssertionError(f"{attempt!r} (FUZZ_SEED={SEED}): {type(error).__name__}: {error}") from error


def refused(what: Callable[[], object], attempt: object) -> None:
    """A UserError of one line, and nothing else."""
    refusals: list[UserError] = []

    def note() -> None:
        try:
            what()
        except UserError as error:
            refusals.append(error)
            raise

    refused_or_fine(note, attempt)
    assert refusals, f"{attempt!r} (FUZZ_SEED={SEED}) is accepted"


def damage(data: bytes, dice: random.Random) -> bytes:
    """The bytes, cut, flipped, repeated, overwritten or replaced."""
    broken = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        place, length = dice.randrange(len(broken) + 1), dice.choice((1, 4, 100, 5000))
        kind = dice.randrange(5)
        if kind == 0:
            del broken[place:]
        elif kind == 1:
            broken[place : place + length] = dice.randbytes(length)
        elif kind == 2 and place < len(broken):
            broken[place] ^= 1 << dice.randrange(8)
        elif kind == 3:
            broken[place:place] = broken[:length]
        elif dice.random() < 0.1:
            broken = bytearray(dice.randbytes(length))
    return bytes(broken)
