"""Termination signals: which ones a program handles, and the terminal that may be closed by then."""

import os
import signal
from types import FrameType

from .._system import STOPPING, signals_named
from ..errors import Interrupted

_SAME_S = 0.3  # one Ctrl-C may arrive twice: from the terminal, and passed on by another process
_HANG_UP = signals_named("SIGHUP")  # the terminal was closed; not on Windows


def handled_signals(numbers: tuple[signal.Signals, ...] = STOPPING) -> list[signal.Signals]:
    """The signals to handle: all given ones, without SIGHUP where it was ignored at the start (nohup)."""
    ignored = [number for number in _HANG_UP if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in numbers if number not in ignored]


def forces_exit(number: int, seconds: float) -> bool:
    """Whether a second signal, so many seconds after the first, ends the process at once.

    SIGHUP never does: when a terminal closes, both the system and the shell send it.
    """
    return seconds > _SAME_S and number not in _HANG_UP


def terminal_streams() -> list[int]:
    """Which of standard output (1) and standard error (2) are terminals."""
    return [stream for stream in (1, 2) if os.isatty(stream)]


def redirect_closed_terminals(streams: list[int]) -> None:
    """Redirect streams to /dev/null that were terminals at the start of the program, and were closed since.

    Writing to a closed terminal is an error.
    """
    for stream in set(streams) - set(terminal_streams()):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream)
        os.close(null)


def exit_on_signals() -> None:
    """From now on Ctrl-C, SIGTERM and the like raise Interrupted."""
    opened = terminal_streams()

    def leave(number: int, frame: FrameType | None) -> None:
        redirect_closed_terminals(opened)
        raise Interrupted(number, agreed=False)

    for number in handled_signals():
        signal.signal(number, leave)
