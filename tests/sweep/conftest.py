"""A server that runs are forked from, for the tests of processes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchscope.sweep import fork_server
from batchscope.sweep.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package")
def kept() -> Iterator[list[ForkServer]]:
    """The server of the test before."""
    servers: list[ForkServer] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, kept: list[ForkServer]) -> ForkServer:
    """A server that imports nothing, so that it starts at once; the one of the test before if that has not ended it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(fork_server, "JOB", "tests.support.forked")
    monkeypatch.setattr(fork_server, "environment", lambda: os.environ | {"PYTEST_CURRENT_TEST": ""})  # it changes
    if not kept or kept[0]._process is None or kept[0]._process.poll() is not None:
        kept[:] = [ForkServer([])]
    return kept[0]
