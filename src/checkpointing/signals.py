"""Termination signals: which signals a program handles, and terminals that may be closed when a signal arrives."""

import os
import signal
from types import FrameType

from .._system import STOPPING, signals_named
from ..errors import Interrupted

_REPEAT_S = 0.3  # one Ctrl-C may arrive twice: from the terminal, and forwarded by another process
_HANG_UP = signals_named("SIGHUP")  # the terminal was closed; not on Windows


def handled_signals(numbers: tuple[signal.Signals, ...] = STOPPING) -> list[signal.Signals]:
    """Return those of the signals to handle: not SIGHUP if the process started with SIGHUP ignored (nohup)."""
    ignored = [number for number in _HANG_UP if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in numbers if number not in ignored]


def forces_exit(number: int, seconds: float) -> bool:
    """Whether a second signal, `seconds` after the first, ends the process at once.

    SIGHUP never does: when a terminal closes, both the system and the shell send SIGHUP.
    """
    return seconds > _REPEAT_S and number not in _HANG_UP


def terminal_streams() -> list[int]:
    """Return which of standard output (1) and standard error (2) are terminals."""
    return [stream for stream in (1, 2) if os.isatty(stream)]


def redirect_closed_terminals(streams: list[int]) -> None:
    """Redirect to /dev/null those of the streams whose terminal was closed: writing to a closed terminal is an error.

    The streams were terminals at the start of the program.
    """
    for stream in set(streams) - set(terminal_streams()):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream)
        os.close(null)


def exit_on_signals() -> None:
    """Have Ctrl-C, SIGTERM and the other termination signals raise Interrupted from now on."""
    terminals = terminal_streams()

    def raise_interrupted(number: int, frame: FrameType | None) -> None:
        redirect_closed_terminals(terminals)
        raise Interrupted(number, agreed=False)

    for number in handled_signals():
        signal.signal(number, raise_interrupted)
