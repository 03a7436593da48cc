"""How long tests wait for an event. The limit ends a test that hangs; it says nothing about speed."""

import time
from collections.abc import Callable

# A busy machine, or one that stops all processes for minutes, is no hang. torch gives up a lost rank after 1,800 s.
PATIENCE_S = 1200


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Wait until `happened()` is true; `what` is the message when it does not become true."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
