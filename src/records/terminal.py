"""Text that fits a terminal: its width, wrapped lines, and whether a line can be redrawn."""

import contextlib
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable

WITHOUT_TERMINAL = 140  # columns
_EVERY_S = 10.0
_VERBOSE = "BATCHSCOPE_VERBOSE"
_JOIN = "\0"  # in place of a space at which a line must not break


def columns() -> int:
    """The width of the terminal, or what `COLUMNS` says; WITHOUT_TERMINAL where there is neither."""
    return shutil.get_terminal_size((WITHOUT_TERMINAL, 24)).columns


def be_verbose() -> None:
    """Print the details of each run, in this process and those that it starts."""
    os.environ[_VERBOSE] = "1"


def is_verbose() -> bool:
    """Whether the user asked for details."""
    return bool(os.environ.get(_VERBOSE))


def can_redraw() -> bool:
    """Whether standard output is a terminal or a notebook, in which a line can be redrawn."""
    return bool(getattr(sys.stdout, "isatty", lambda: False)()) or "ipykernel" in sys.modules


def say(text: str, end: str = "\n") -> None:
    """Print, or go on in silence: a closed pipe (`… | head -1`) or a full disk ends no measurement."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed, or cannot encode the text
        print(text, end=end, flush=True)


class LiveLine:
    """A line that says what happens: drawn again in a terminal, else printed every ten seconds.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._printed_at = -math.inf
        self._drawn = 0  # characters of the line that stands

    def __call__(self, text: str) -> None:
        """Say it."""
        if can_redraw():
            text = text[: columns() - 1]
            say(f"\r{text.ljust(self._drawn)}", end="")
            self._drawn = len(text)
        elif self._clock() - self._printed_at >= _EVERY_S:
            self._printed_at = self._clock()
            say(text)

    def clear(self) -> None:
        """Make room for other text."""
        if self._drawn:
            say(f"\r{' ' * self._drawn}\r", end="")
            self._drawn = 0


def wrapped(lines: Iterable[str], width: int | None = None, indent: int = 2) -> list[str]:
    """Lines in at most so many columns, those of the terminal by default. A word that is longer stays whole.

    A line that continues begins `indent` columns behind its own beginning. A line breaks before ` · ` and ` + ` where
    what stands between them fits.
    """
    width, found = width or columns(), []
    for line in lines:
        text = line.lstrip(" ")
        margin = " " * (len(line) - len(text))
        items = re.split(r" (?=[·+] )", text)
        room = width - len(margin) - indent
        if len(items) > 2:
            text = " ".join(item.replace(" ", _JOIN) if len(item) <= room else item for item in items)
        wrapper = textwrap.TextWrapper(
            width,
            initial_indent=margin,
            subsequent_indent=margin + " " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        found += [part.replace(_JOIN, " ") for part in wrapper.wrap(text)] or [""]
    return found
