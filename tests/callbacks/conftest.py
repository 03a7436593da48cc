"""Fixtures for tests of callbacks."""

from types import SimpleNamespace

import pytest

from batchscope.callbacks import _measurement, _timer, _windows, device
from batchscope.hardware.processor import Noise
from tests.callbacks.support import World


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch):
    """The device's calibration; None before a test sets it."""
    found = [None]
    monkeypatch.setattr("batchscope.hardware.measure.find_calibration", lambda device, measure: found[0])
    return found


@pytest.fixture
def noises(monkeypatch: pytest.MonkeyPatch) -> list[Noise]:
    """What the meter reads at the ends of windows; quiet where the list is empty."""
    found = []
    meter = SimpleNamespace(read=lambda: found.pop(0) if found else Noise(others_share=0.0, idle_share=0.5))
    monkeypatch.setattr(_windows, "NoiseMeter", lambda: meter)
    return found


@pytest.fixture(params=[False])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """Times the steps and the samples; its device lags behind if a test asks for that."""
    world = World(request.param)
    clock = SimpleNamespace(perf_counter=world.mark)
    monkeypatch.setattr(_measurement, "clock_for", lambda device: world)
    monkeypatch.setattr(device, "Telemetry", world.sample)
    for module in (_measurement, _timer):
        monkeypatch.setattr(module, "time", clock)
    return world
