"""Output to a terminal: its width, wrapped lines, a line that is redrawn, and how much a run prints."""

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
BLOCK = 80  # the maximal width of a run's last lines, in columns
LABEL = 8  # the width of the label in front of each of these lines
_VERBOSE = "BATCHSCOPE_VERBOSE"  # in the environment, which the processes of a sweep and of other ranks inherit
_IN_SWEEP = "BATCHSCOPE_IN_SWEEP"  # in the environment of a sweep's runs: the sweep prints their results
_PRINT_INTERVAL_S = 10.0  # of a line that cannot be redrawn


def columns() -> int:
    """Return the width of the terminal, or `COLUMNS` of the environment; WITHOUT_TERMINAL without either."""
    return shutil.get_terminal_size((WITHOUT_TERMINAL, 24)).columns


def can_redraw() -> bool:
    """Whether standard output is a terminal or a notebook, in which a line can be redrawn."""
    return bool(getattr(sys.stdout, "isatty", lambda: False)()) or "ipykernel" in sys.modules


def say(text: str, end: str = "\n") -> None:
    """Print, and ignore failures: a closed pipe (`… | head -1`) or a full disk ends no measurement.

    A character that the stream cannot encode is printed as a plain one: `->` for `→`.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(text.encode(encoding, PLAIN).decode(encoding), end=end, flush=True)


class LiveLine:
    """A line of progress: redrawn in a terminal, elsewhere printed at most every ten seconds."""

    def __init__(self) -> None:
        self._printed_at = -math.inf
        self._drawn = 0  # characters of the visible line

    def __call__(self, text: str, now: bool = False) -> None:
        """Show a text; with `now` also less than ten seconds after another one, as before a long silence."""
        if can_redraw():
            text = text[: columns() - 1]
            say(f"\r{text.ljust(self._drawn)}", end="")
            self._drawn = len(text)
        elif now or time.monotonic() - self._printed_at >= _PRINT_INTERVAL_S:
            self._printed_at = time.monotonic()
            say(text)

    def clear(self) -> None:
        """Erase the line, to make room for other text."""
        if self._drawn:
            say(f"\r{' ' * self._drawn}\r", end="")
            self._drawn = 0


def be_verbose() -> None:
    """Make runs print their details, in this process and in those that it starts."""
    os.environ[_VERBOSE] = "1"


def is_verbose() -> bool:
    """Whether runs print their details."""
    return bool(os.environ.get(_VERBOSE))


def leave_words_to_sweep() -> None:
    """Mark this process as a run of a sweep, which prints one line on it."""
    os.environ[_IN_SWEEP] = "1"


def is_in_sweep() -> bool:
    """Whether this process is a run of a sweep."""
    return bool(os.environ.get(_IN_SWEEP))


def has_words() -> bool:
    """Whether a run prints what it trains and its results: outside a sweep, or with details."""
    return is_verbose() or not is_in_sweep()


def row(label: str, text: str) -> str:
    """Format one of a run's last lines: a label and a text."""
    return f"{label:<{LABEL}}{text}"


def block(lines: Iterable[str], indent: int = LABEL) -> str:
    """Wrap a run's last lines to at most 80 columns, with continuation lines indented by `indent` columns."""
    return "\n".join(wrapped(lines, min(BLOCK, columns()), indent))


def wrapped(lines: Iterable[str], width: int | None = None, indent: int = 2) -> list[str]:
    """Wrap lines to a width in columns, by default that of the terminal. A longer word is not broken.

    Continuation lines are indented by `indent` columns more than their first line.
    """
    width, rows = width or columns(), []
    for line in lines:
        margin = line[: len(line) - len(line.lstrip(" "))]
        hanging = margin + " " * indent
        wrapper = textwrap.TextWrapper(width, margin, hanging, break_long_words=False, break_on_hyphens=False)
        rows += wrapper.wrap(line.lstrip(" ")) or [""]
    return rows
