"""A server that runs are forked from, for the tests of processes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchscope.sweep import fork_server
from batchscope.sweep.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A server that imports nothing, so that it starts at once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(fork_server, "JOB", "tests.support.forked")
    monkeypatch.setattr(fork_server, "environment", lambda: os.environ | {"PYTEST_CURRENT_TEST": ""})  # it changes
    made = ForkServer([])
    yield made
    made.close()
