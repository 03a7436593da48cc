"""Runs that are stand-ins, for the tests of plans, loops and processes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchscope.sweep import process
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job, Plan, Record

ROOT = Path(__file__).resolve().parents[2]


def use_stand_ins() -> None:
    """From now on runs are stand-ins (tests/support/stand_in.py), forked from a server that imports no torch."""
    process.PROGRAM = "tests.support.stand_in"
    process.PRELOADED = [process.PROGRAM, process.__name__]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """Its runs are stand-ins."""
    for name in ("PROGRAM", "PRELOADED"):
        monkeypatch.setattr(process, name, getattr(process, name))  # as they are again after the test
    use_stand_ins()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Loop()


@pytest.fixture
def do(loop: Loop, tmp_path: Path) -> Callable[..., list[Record]]:
    """Do runs in the folders a, b, …, each of which does a line of Python; returns their records."""

    def do(*lines: str, timed: bool = False, **how: Any) -> list[Record]:
        named = enumerate(zip("abc", lines, strict=False), 1)
        return loop.do([replace(job(tmp_path, name, 8**n, timed, does=does), **how) for n, (name, does) in named])

    return do


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
    pids, all_ = (folder / "pids").read_text().split(), psutil.process_iter(["status"])
    return [one.pid for one in all_ if str(one.pid) in pids and one.info["status"] != psutil.STATUS_ZOMBIE]
