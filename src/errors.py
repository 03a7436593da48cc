"""The exception that a user's mistake raises, and the one place that prints it."""

import argparse
import difflib
import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn, TypeGuard

from . import ranks
from ._system import PLAIN, has_no_reader, relative

_WAIT_FOR_RANK_0_S = 3
_SIGPIPE_EXIT_CODE = 141  # 128 + SIGPIPE, as a shell shows it


class UserError(Exception):
    """A mistake that the user can correct. Its message is one line: the option, what it got, what it takes.

    `exit_code` is 2 for a command line that cannot be parsed, and otherwise 1.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message, exit_code)  # both, so that it survives pickling into and out of a worker process
        self.exit_code = exit_code
        self.reported = False

    def __str__(self) -> str:
        return printable(" ".join(str(self.args[0]).split()))


def printable(text: str) -> str:
    """A text that is safe to print: other control characters than line ends are replaced."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value from a file is a text without the characters that no option has, such as a terminal's escapes."""
    return isinstance(value, str) and value.isprintable()


def cut(text: str, width: int) -> str:
    """A text of at most `width` characters; one that is longer ends behind a word, if there is one, and with ` …`."""
    if len(text) <= width:
        return text
    head = text[: width - 1].rpartition(" ")[0] or text[: width - 2]
    return f"{head.rstrip()} …"


def in_one_line(error: BaseException, width: int = 200) -> str:
    """The class and the message of anybody's exception."""
    return cut(printable(" ".join(f"{type(error).__name__}: {error}".split())), width)


def place_of(error: BaseException, is_own: Callable[[str], bool]) -> str:
    """Where in the user's own packages an error was raised last, in brackets; empty where it was elsewhere."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_own(package_of(frame))
    ]
    return f" ({relative(frames[-1][0])}, line {frames[-1][1]})" if frames else ""


def package_of(frame: FrameType) -> str:
    """The package whose code a frame runs."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


class NonFiniteError(UserError):
    """A loss or a gradient is infinite or NaN."""


class DataError(UserError):
    """A user's data could not be loaded."""


class MetricError(UserError):
    """A metric that is to decide something is not measured."""


class UnfitError(UserError):
    """A model does not take what it is to be trained on: nothing was trained, and nothing of the run has to be kept."""


class PeerLostError(UserError):
    """Another process of the run has ended. Only that process can say why."""


class Interrupted(SystemExit):
    """A signal has asked the run to end, all ranks together if `agreed`; exit code 128 + number, as in shells."""

    def __init__(self, number: int, agreed: bool = True):
        super().__init__(128 + number)
        self.agreed = agreed
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`" Did you mean 'x'?"` for the nearest known spelling, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""


def report(error: UserError) -> None:
    """Print the error's line, once even if several layers report it.

    Ranks other than 0 wait 3 s first: if rank 0 has met the same error, it ends them before they print it again.
    """
    if error.reported:
        return
    error.reported = True
    rank = ranks.current().rank
    if rank:
        time.sleep(_WAIT_FOR_RANK_0_S)
    print(f"error: {f'process {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print `warning: <message>` on standard error; on rank 0 only."""
    if not ranks.current().rank:
        print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


def refuse_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Make a parser raise UserError with exit code 2, and with what to do, instead of printing its usage."""

    def refuse(message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        if unknown:
            near = did_you_mean(
                words.partition(" ")[0].partition("=")[0], re.findall(r"--[\w-]+", parser.format_usage())
            )
            message += near and f".{near}"
        elif message.startswith("the following arguments are required: "):
            message += f"; {parser.prog} --help says what it takes"
        raise UserError(message, exit_code=2)

    parser.error = refuse


def show_tracebacks() -> None:
    """Have `exit_on_user_error` print the traceback of a UserError, as HYDRA_FULL_ERROR=1 does."""
    os.environ["HYDRA_FULL_ERROR"] = "1"


def exit_on_user_error(program: Callable[[], None]) -> None:
    """Run a program; a UserError ends it with one line and an exit code.

    HYDRA_FULL_ERROR=1 in the environment adds the traceback. A closed standard output (`… --help | head -1`) ends the
    program silently; one that has ended keeps its exit code.
    """
    for stream in (sys.stdout, sys.stderr):  # a character that they have no code for becomes `->` and the like, or `?`
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
    try:
        try:
            program()
        except UserError as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            report(error)
            sys.exit(error.exit_code)
        finally:
            if sys.stdout:
                sys.stdout.flush()  # a closed pipe raises here, and not while the interpreter shuts down
    except OSError as error:
        if not has_no_reader(error):
            raise  # a failure, or another pipe than standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
        ended = error.__context__  # where the last flush failed
        sys.exit(ended.code if isinstance(ended, SystemExit) else _SIGPIPE_EXIT_CODE)
    except KeyboardInterrupt:  # no run has started that would save a checkpoint
        sys.exit(130)
