"""What fuzzers share: a budget of time, hostile values, and what counts as a good answer to them."""

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


def refused_or_fine(what: Callable[[], object], attempt: object) -> bool:
    """Whether it is refused: by a UserError of one line. Anything else that is raised is a fault of the program's."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            what()
    except UserError as error:
        assert str(error) and "\n" not in str(error), attempt
        return True
    except Exception as error:
        raise AssertionError(f"{attempt!r} (FUZZ_SEED={SEED}): {type(error).__name__}: {error}") from error
    return False


def refused(what: Callable[[], object], attempt: object) -> None:
    """A UserError of one line, and nothing else."""
    assert refused_or_fine(what, attempt), f"{attempt!r} (FUZZ_SEED={SEED}) is accepted"
