"""Which signals end a run, and which second signal ends it at once."""

import signal

import pytest

from batchscope.checkpointing.signals import STOPPING, forces_exit, handled_signals


def test_a_hang_up_is_heeded_unless_it_was_ignored_from_the_start() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert handled_signals() == list(STOPPING) == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert handled_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "seconds", "at_once"),
    [
        (signal.SIGINT, 0.1, False),
        (signal.SIGINT, 0.4, True),
        (signal.SIGTERM, 0.4, True),
        (signal.SIGHUP, 0.4, False),  # a closed terminal sends two, and systemd sends one after SIGTERM
    ],
)
def test_a_second_signal_ends_a_run_at_once(number: int, seconds: float, at_once: bool) -> None:
    assert forces_exit(number, seconds) is at_once
