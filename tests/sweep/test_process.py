"""How a run ended that could not record it: known for certain, or called killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchscope.checkpointing.resume import lock_run_dir
from batchscope.records.read import read
from batchscope.sweep import process

HOLD = """
import pathlib, sys
from batchscope.checkpointing.resume import lock_run_dir
with lock_run_dir(pathlib.Path(sys.argv[1])):
    print(1, flush=True)
    input()
"""


def run_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch, status: str = "running") -> dict:
    """The record of a run whose process does nothing but this line of a shell's."""
    program, run_dir = folder / "program", folder / "run"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    run_dir.mkdir(exist_ok=True)
    (run_dir / "run.json").write_text(json.dumps({"schema": 3, "status": status, "metrics": {"val/loss": 1}}))
    monkeypatch.setattr(sys, "executable", str(program))
    return process.run_in_subprocess(run_dir, digest="")


@pytest.mark.parametrize(
    ("does", "status", "reason"),
    [
        ("kill -KILL $$", "killed", "killed by SIGKILL"),
        ("kill -TERM $$", "killed", "killed by SIGTERM"),
        ("kill -SEGV $$", "failed", "killed by SIGSEGV"),
        ("exit 143", "interrupted", "stopped by SIGTERM"),
        ("exit 7", "failed", "ended with exit code 7 and said no more"),
    ],
)
def test_a_run_that_said_nothing_is_told_by_how_its_process_ended(
    does: str, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_that(does, tmp_path, monkeypatch)
    assert (record["status"], record["error"]) == (status, reason)
    assert record["metrics"] == {"val/loss": 1}


def test_what_a_run_said_of_its_end_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_that("kill -KILL $$", tmp_path, monkeypatch, status="out_of_memory")["status"] == "out_of_memory"


def test_a_run_that_is_going_on_elsewhere_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        assert run_that("exit 1", tmp_path, monkeypatch)["status"] == "running"
        other.communicate("done")


def test_a_kill_by_the_system_for_want_of_memory_in_the_runs_own_group_is_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((3, 4))
    monkeypatch.setattr(process, "_kills_for_memory", lambda: next(counts))
    assert run_that("kill -KILL $$", tmp_path, monkeypatch)["status"] == "out_of_memory"


def control_group(folder: Path, members: list[int]) -> int | None:
    """What a control group says in which these processes are, one of which was killed for want of memory."""
    group = folder / "groups" / "mine"
    group.mkdir(parents=True)
    (folder / "self").mkdir()
    (folder / "self/cgroup").write_text("4:memory:/other\n0::/mine\n")
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members))
    (group / "memory.events.local").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n")
    return process._kills_for_memory(folder, folder / "groups")


def test_a_control_group_counts_where_nobody_else_is_in_it(tmp_path: Path) -> None:
    assert control_group(tmp_path / "alone", [os.getpid()]) == 1
    assert control_group(tmp_path / "shared", [os.getpid(), os.getppid()]) is None
    assert process._kills_for_memory(tmp_path / "no such", tmp_path) is None


def test_a_job_whose_run_is_going_on_elsewhere_leaves_its_record(tmp_path: Path) -> None:
    from batchscope.sweep import job

    (tmp_path / "run.json").write_text(json.dumps({"schema": 3, "status": "planned", "config": None}))
    before = read(tmp_path)
    with lock_run_dir(tmp_path), pytest.raises(Exception, match="."):
        job.run_planned(tmp_path)
    assert read(tmp_path) == before
