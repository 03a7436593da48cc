"""A server that runs are forked from, and runs that are stand-ins, for the tests of processes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchscope.sweep import fork_server
from batchscope.sweep.fork_server import ForkServer
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job, Plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package")
def kept() -> Iterator[dict[str, ForkServer]]:
    """The servers of the tests before, by their program."""
    servers: dict[str, ForkServer] = {}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, kept: dict[str, ForkServer]) -> Callable[[str], ForkServer]:
    """A server that imports nothing, for a program; the one of the test before if that has not ended it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(fork_server, "environment", lambda: os.environ | {"PYTEST_CURRENT_TEST": ""})  # it changes

    def serve(program: str) -> ForkServer:
        monkeypatch.setattr(fork_server, "JOB", program)
        if program not in kept or kept[program]._process is None or kept[program]._process.poll() is not None:
            kept[program] = ForkServer()
        return kept[program]

    return serve


@pytest.fixture
def server(serve: Callable[[str], ForkServer]) -> ForkServer:
    """Its runs do what their words say in Python."""
    return serve("tests.support.forked")


@pytest.fixture
def loop(serve: Callable[[str], ForkServer], monkeypatch: pytest.MonkeyPatch) -> Loop:
    """Its runs are stand-ins (tests/support/stand_in.py)."""
    if not fork_server.is_supported():
        monkeypatch.setattr(fork_server, "JOB", "tests.support.stand_in")
        return Loop()
    return Loop(serve("tests.support.stand_in"))


TIMED = {"until_known": {"precision": 0.05, "seconds": 0.3}, "throughput": {"a": 1}}


def job(folder: Path, name: str, size: int = 8, timed: bool = True, **config: Any) -> Job:
    """A run, which waits for visits if it is timed and beside others."""
    run_dir = folder / name
    trainer = {"devices": 1, "accelerator": "cpu"}
    plain = {"run_dir": str(run_dir), "data": {"batch_size": size}, "trainer": trainer, "search": None, **config}
    plain["callbacks"] = TIMED if timed else None
    return Job(run_dir, plain, {"choices": {}, "overrides": [f"data.batch_size={size}"]}, f"run {name}")


def play(plan: Plan[Any], do: Callable[[Job], dict[str, Any]]) -> Any:
    """What a plan returns if `do` gives the record of each run."""
    try:
        jobs = next(plan)
        while True:
            jobs = plan.send([do(one) for one in jobs])
    except StopIteration as end:
        return end.value


def running(folder: Path) -> list[int]:
    """The processes of stand-ins that have not ended."""
    pids = map(int, (folder / "pids").read_text().split())
    return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
