"""The signals that end a run in good order, and the terminal that may be gone by then."""

import os
import signal

_SAME_S = 0.3  # a Ctrl-C reaches every process of a terminal, and may be passed on to this one by another as well
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def handled_signals(numbers: tuple[signal.Signals, ...] = STOPPING) -> list[signal.Signals]:
    """Those of the signals that a run acts on: not SIGHUP, if whoever started this process had it ignored (nohup)."""
    nohup = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (nohup and number == signal.SIGHUP)]


def forces_exit(number: int, seconds: float) -> bool:
    """Whether a further signal, so many seconds after the first one, asks for the end at once.

    SIGHUP never does: when a terminal closes, both the system and the shell send it.
    """
    return seconds > _SAME_S and number != getattr(signal, "SIGHUP", None)


def terminals() -> list[int]:
    """Which of standard output and standard error are a terminal."""
    return [stream for stream in (1, 2) if os.isatty(stream)]


def leave_lost(streams: list[int]) -> None:
    """Send to nowhere what is written to a terminal that has hung up: the system refuses it with an error.

    Args:
        streams: what `terminals` returned when the program began.
    """
    for stream in set(streams) - set(terminals()):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
