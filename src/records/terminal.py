"""Text that fits a terminal: its width, wrapped lines, whether a line can be redrawn, and how much is said."""

import contextlib
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable

from .._system import PLAIN

WITHOUT_TERMINAL = 140  # columns
BLOCK = 80  # columns of a run's last lines, at most
LABEL = 8  # columns in front of each of these lines
_VERBOSE = "BATCHSCOPE_VERBOSE"  # in the environment, so that the processes of a sweep and of other ranks know it
_IN_SWEEP = "BATCHSCOPE_IN_SWEEP"  # in the environment of a sweep's runs: the sweep says what came of them
_EVERY_S = 10.0  # seconds, of a line that cannot be redrawn


def columns() -> int:
    """The width of the terminal, or what `COLUMNS` says; WITHOUT_TERMINAL where there is neither."""
    return shutil.get_terminal_size((WITHOUT_TERMINAL, 24)).columns


def can_redraw() -> bool:
    """Whether standard output is a terminal or a notebook, in which a line can be redrawn."""
    return bool(getattr(sys.stdout, "isatty", lambda: False)()) or "ipykernel" in sys.modules


def say(text: str, end: str = "\n") -> None:
    """Print, or go on in silence: a closed pipe (`… | head -1`) or a full disk ends no measurement.

    A character that the stream has no code for is printed as a plain one: `->` for `→`.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(text.encode(encoding, PLAIN).decode(encoding), end=end, flush=True)


class LiveLine:
    """A line that says what happens: drawn again in a terminal, else printed every ten seconds."""

    def __init__(self) -> None:
        self._printed_at = -math.inf
        self._drawn = 0  # characters of the line that stands

    def __call__(self, text: str, now: bool = False) -> None:
        """Say it; `now` although another text was said just before, as where nothing more is said for long."""
        if can_redraw():
            text = text[: columns() - 1]
            say(f"\r{text.ljust(self._drawn)}", end="")
            self._drawn = len(text)
        elif now or time.monotonic() - self._printed_at >= _EVERY_S:
            self._printed_at = time.monotonic()
            say(text)

    def clear(self) -> None:
        """Make room for other text."""
        if self._drawn:
            say(f"\r{' ' * self._drawn}\r", end="")
            self._drawn = 0


def be_verbose() -> None:
    """From now on runs print their details, in this process and in those that it starts."""
    os.environ[_VERBOSE] = "1"


def is_verbose() -> bool:
    """Whether runs print their details."""
    return bool(os.environ.get(_VERBOSE))


def leave_words_to_sweep() -> None:
    """This process is a run of a sweep, which prints one line on it."""
    os.environ[_IN_SWEEP] = "1"


def is_in_sweep() -> bool:
    """Whether this process is a run of a sweep."""
    return bool(os.environ.get(_IN_SWEEP))


def has_words() -> bool:
    """Whether a run prints what it trains and what came of it: alone, or where the user wants details."""
    return is_verbose() or not is_in_sweep()


def row(label: str, text: str) -> str:
    """A line of a run's last lines."""
    return f"{label:<{LABEL}}{text}"


def block(lines: Iterable[str], indent: int = LABEL) -> str:
    """A run's last lines, in at most 80 columns; what continues stands `indent` columns behind the line's beginning."""
    return "\n".join(wrapped(lines, min(BLOCK, columns()), indent))


def wrapped(lines: Iterable[str], width: int | None = None, indent: int = 2) -> list[str]:
    """Lines in at most so many columns, those of the terminal by default. A word that is longer stays whole.

    A line that continues begins `indent` columns behind its own beginning.
    """
    width, parts = width or columns(), []
    for line in lines:
        margin = line[: len(line) - len(line.lstrip(" "))]
        hanging = margin + " " * indent
        wrapper = textwrap.TextWrapper(width, margin, hanging, break_long_words=False, break_on_hyphens=False)
        parts += wrapper.wrap(line.lstrip(" ")) or [""]
    return parts
