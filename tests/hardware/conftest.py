"""Each test in this folder gets the warnings that a process gives once."""

import pytest

from batchscope.hardware import probes


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(probes, "_warned", set())
