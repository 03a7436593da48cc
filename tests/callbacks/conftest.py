"""Fixtures for tests of callbacks."""

import pytest

from batchscope.callbacks import _analysis, throughput
from batchscope.hardware.calibration import Calibration
from tests.callbacks.support import World


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Calibration | None]:
    """The device's calibration; None before a test sets it."""
    found: list[Calibration | None] = [None]
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: found[0])
    return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """The clock by which a ThroughputMonitor times steps."""
    made = World()
    monkeypatch.setattr(throughput, "clock_for", lambda device: made)
    return made
