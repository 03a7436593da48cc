"""The one exception that a user's mistake raises, and the one place that prints it."""

import argparse
import difflib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from . import ranks

_AFTER_THE_FIRST_S = 3
_SIGPIPE_EXIT_CODE = 141  # 128 + SIGPIPE, as a shell shows a program whose reader has gone
_LONGEST = 1000  # characters of a message; what is longer quotes a value that nobody wants to read


class UserError(Exception):
    """Something the user can put right. Its message is one line: the option, what it got, what it takes.

    Args:
        message: the line, without a leading "error:".
        exit_code: 1, or 2 for a command line that cannot be parsed.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message, exit_code)  # both, so that it survives pickling into and out of a worker process
        self.exit_code = exit_code
        self.reported = False

    def __str__(self) -> str:
        line = printable(" ".join(str(self.args[0]).split()))
        return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 200]} … {line[-200:]}"


def printable(text: str) -> str:
    """A text that may hold what a file says, as a terminal may show it: of what cannot be printed, line ends alone."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


class PeerLostError(UserError):
    """Another process of the run has gone; why, only that one can say."""


class Interrupted(SystemExit):
    """The run was told to end.

    Args:
        number: of the signal; the exit code is 128 more, as shells have it.
        agreed: whether the other ranks end with this one.
    """

    def __init__(self, number: int, agreed: bool = True):
        super().__init__(128 + number)
        self.agreed = agreed
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest of the known spellings, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def report(error: UserError) -> None:
    """Print the error's line once, however many layers it passes through.

    Of several processes, those after the first wait a moment: where it has met the same error, they are ended with it.
    """
    if error.reported:
        return
    error.reported = True
    rank = ranks.current().rank
    if rank:
        time.sleep(_AFTER_THE_FIRST_S)
    print(f"error: {f'process {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print `warning: <message>` on standard error; of several processes, only the first does."""
    if not ranks.current().rank:
        print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


def refuse_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Have a parser raise UserError, exit code 2, where argparse prints its usage and the error below it."""

    def refuse(message: str) -> NoReturn:
        raise UserError(message, exit_code=2)

    parser.error = refuse


_OURS = "BATCHSCOPE_SET_FULL_ERROR"


def reraise_in_hydra() -> None:
    """Have Hydra pass exceptions on instead of formatting them, without making our own errors show tracebacks."""
    if os.environ.get("HYDRA_FULL_ERROR") != "1":
        os.environ["HYDRA_FULL_ERROR"] = os.environ[_OURS] = "1"


def exit_on_user_error(program: Callable[[], None]) -> None:
    """Run a program; end it with one line and an exit code when the user made a mistake.

    With HYDRA_FULL_ERROR=1 in the environment the traceback is shown as well. A program whose output nobody reads any
    more, as in `… --help | head -1`, ends in silence.
    """
    full = os.environ.get("HYDRA_FULL_ERROR") == "1" and _OURS not in os.environ
    try:
        try:
            program()
        except UserError as error:
            if full:
                traceback.print_exc()
            _leave(error)
        finally:
            if sys.stdout:
                sys.stdout.flush()  # a closed pipe shows itself here, and not in the interpreter's last moments
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
        sys.exit(_SIGPIPE_EXIT_CODE)
    except KeyboardInterrupt:  # before there is a run that could be interrupted in good order
        sys.exit(130)


def _leave(error: UserError) -> NoReturn:
    report(error)
    sys.exit(error.exit_code)


def _nobody_reads() -> bool:
    """Whether the other end of standard output is closed; a pipe to another process may break as well."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False
