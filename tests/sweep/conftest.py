"""Runs that are stand-ins (tests/support/stand_in.py), for the tests of plans, loops and processes."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from batchscope.records.read import read
from batchscope.records.run_record import write_planned
from batchscope.sweep import process
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job
from tests.support.synthetic_runs import change_record, write_steps


def stand_ins(monkeypatch):
    """A loop whose runs are stand-ins, forked from a server that imports no torch."""
    monkeypatch.setattr(process, "PROGRAM", "tests.support.stand_in")
    monkeypatch.setattr(process, "PRELOADED", [process.PROGRAM, process.__name__])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    return Loop()


loop = pytest.fixture(stand_ins)


@pytest.fixture
def do(loop, tmp_path):
    """A function that does runs in the folders a, b, …, each by a line of Python, and returns their records."""

    def do(*lines, timed=False, **changes):
        named = enumerate(zip("abc", lines, strict=False), 1)
        return loop.do([replace(job(tmp_path, name, 8**n, timed, does=does), **changes) for n, (name, does) in named])

    return do


TIMED = {"until_known": {"precision": 0.05, "seconds": 0.3}, "throughput": {"a": 1}}
TRAINED = {"throughput": {"a": 1}}


def job(folder, name, size=8, timed=True, does=None, **config):
    """A job. It waits for visits if it is timed and beside others; `does` is no option that distinguishes runs."""
    run_dir = folder / name
    trainer = {"devices": 1, "accelerator": "cpu"}
    plain = {
        "data": {"batch_size": size},
        "trainer": trainer,
        "search": None,
        "tags": does,
        **config,
    }
    plain.setdefault("callbacks", TIMED if timed else None)
    return Job(run_dir, plain, {"choices": {}, "overrides": [f"data.batch_size={size}"]}, f"run {name}")


def running(folder):
    """Return the ids of the stand-ins' running processes."""
    pids, processes = (folder / "pids").read_text().split(), psutil.process_iter(["status"])
    return [proc.pid for proc in processes if str(proc.pid) in pids and proc.info["status"] != psutil.STATUS_ZOMBIE]


def play(plan, do):
    """Run a plan in which `do` returns the record of each job."""
    loop = Loop()
    loop.do = lambda jobs: [do(run_job) for run_job in jobs]
    loop.run(plan)


def ended(job, ms, noise=1.0, passes=None, **fields):
    """Write and return the record of a finished run with simulated steps of `ms`."""
    write_planned(job.run_dir, config=job.config, **job.record_fields)
    size = job.config["data"]["batch_size"]
    cost = {"batch_size": size, "step_ms_median": ms, "samples_per_sec": 1e3 * size / ms}
    change_record(job.run_dir, **{"status": "finished", "throughput": cost, **fields})
    write_steps(job.run_dir, ms * noise * np.ones((8, 10)), rounds=passes)
    return read(job.run_dir)
