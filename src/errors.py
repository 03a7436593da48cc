"""UserError, the exception for a user's mistake, and the one place that prints it."""

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
        super().__init__(message, exit_code)  # both arguments, so that unpickling in another process restores both
        self.exit_code = exit_code
        self.reported = False

    def __str__(self) -> str:
        return printable(" ".join(line.strip() for line in str(self.args[0]).splitlines()))


def printable(text: str) -> str:
    """Return a text that is safe to print: unprintable characters but line ends are replaced."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value from a file is a printable string, without characters such as terminal escapes."""
    return isinstance(value, str) and value.isprintable()


def cut(text: str, width: int) -> str:
    """Return a text of at most `width` characters. A longer one is cut, if possible behind a word, and ends in ` …`."""
    if len(text) <= width:
        return text
    head = text[: width - 1].rpartition(" ")[0] or text[: width - 2]
    return f"{head.rstrip()} …"


def in_one_line(error: BaseException, width: int = 200) -> str:
    """Return the class and the message of any exception, in one line."""
    return cut(printable(" ".join(f"{type(error).__name__}: {error}".split())), width)


def location_of(error: BaseException, is_own: Callable[[str], bool]) -> str:
    """Return the last traceback line in a package that `is_own` accepts, as ` (file, line 3)`, or an empty string."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_own(package_of(frame))
    ]
    return f" ({relative(frames[-1][0])}, line {frames[-1][1]})" if frames else ""


def package_of(frame: FrameType) -> str:
    """Return the name of the package whose code a frame runs."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


class NonFiniteError(UserError):
    """A loss or a gradient is infinite or NaN."""


class DataError(UserError):
    """A user's data could not be loaded."""


class MetricError(UserError):
    """A metric that an option needs for a decision is not measured."""


class UnfitError(UserError):
    """A model does not accept its training data. Nothing was trained, and nothing of the run has to be kept."""


class PeerLostError(UserError):
    """Another process of the run has ended. Only that process can say why."""


class Interrupted(SystemExit):
    """A signal has asked the run to end; exit code 128 + number, as in shells. `agreed`: all ranks end together."""

    def __init__(self, number: int, agreed: bool = True):
        super().__init__(128 + number)
        self.agreed = agreed
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `" Did you mean 'x'?"` with the nearest of the choices, or an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""


def report(error: UserError) -> None:
    """Print the error's line, once even if several layers report it.

    Other ranks than 0 wait 3 s first. If rank 0 has the same error, it ends these ranks before they print it, too.
    """
    if error.reported:
        return
    error.reported = True
    rank = ranks.current_rank().rank
    if rank:
        time.sleep(_WAIT_FOR_RANK_0_S)
    print(f"error: {f'process {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print `warning: <message>` on standard error; on rank 0 only."""
    if not ranks.current_rank().rank:
        print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


def refuse_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Have a parser raise UserError with exit code 2 and a hint, instead of printing its usage."""

    def refuse(message: str) -> NoReturn:
        _, separator, words = message.partition("unrecognized arguments: ")
        if separator:
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
    program silently; a program that has ended before keeps its exit code.
    """
    for stream in (sys.stdout, sys.stderr):  # a character that the encoding lacks becomes ASCII such as `->`, or `?`
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
            raise  # another failure, or a pipe that is not standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        context = error.__context__  # a SystemExit if the program had ended, and only the last flush failed
        sys.exit(context.code if isinstance(context, SystemExit) else _SIGPIPE_EXIT_CODE)
    except KeyboardInterrupt:  # no run has begun that would have to save a checkpoint
        sys.exit(130)
