"""Fixtures for tests of callbacks."""

from types import SimpleNamespace

import pytest

from batchscope.callbacks import _measurement, _timer, _windows, device
from batchscope.hardware.processor import Noise
from tests.callbacks.support import World


@pytest.fixture(autouse=True)
def calibrated(monkeypatch: pytest.MonkeyPatch):
    """The one item is the calibration that a fit finds for its device; None until a test sets it."""
    slot = [None]
    monkeypatch.setattr("batchscope.hardware.measure.find_calibration", lambda device, measure: slot[0])
    return slot


@pytest.fixture
def noises(monkeypatch: pytest.MonkeyPatch) -> list[Noise]:
    """The readings of the noise meter at the ends of windows; a quiet machine where the list is empty."""
    readings = []
    meter = SimpleNamespace(read=lambda: readings.pop(0) if readings else Noise(others_share=0.0, idle_share=0.5))
    monkeypatch.setattr(_windows, "NoiseMeter", lambda: meter)
    return readings


@pytest.fixture(params=[False])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """The simulated clock of steps and samples; its device lags if a test sets the parameter to True."""
    world = World(request.param)
    clock = SimpleNamespace(perf_counter=world.mark)
    monkeypatch.setattr(_measurement, "clock_for", lambda device: world)
    monkeypatch.setattr(device, "Telemetry", world.sample)
    for module in (_measurement, _timer):
        monkeypatch.setattr(module, "time", clock)
    return world
