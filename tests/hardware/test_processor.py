"""Processor time: of the cores that a process may use, of the run itself, and within a container's quota."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from batchscope.hardware.processor import cpu_seconds, own_seconds, usable_cores

STAT = """\
cpu  99999 0 0 99999 0 0 0 0 0 0
cpu0 500 10 200 1000 50 3 2 30 400 5
cpu1 90000 0 0 0 0 0 0 0 0 0
cpu2 100 0 0 2000 0 0 0 70 0 0
intr 12345 0 9
"""
BUSY_S = (500 + 10 + 200 + 3 + 2 + 30 + 100 + 70) / 100


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A `/proc` with these lines in `stat`, for a process that may use the cores 0 and 2 and has no children."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    tasks = tmp_path / str(os.getpid()) / "task" / "1"
    tasks.mkdir(parents=True)
    (tasks / "children").write_text("")

    def write(stat: str) -> Path:
        (tmp_path / "stat").write_text(stat)
        return tmp_path

    return write


def test_the_time_is_that_of_the_usable_cores_with_steal_and_guests_once(proc) -> None:
    load = cpu_seconds(proc(STAT), Path("/nonexistent"))
    assert load[:2] == pytest.approx((BUSY_S + (1000 + 50 + 2000) / 100, BUSY_S))


@pytest.mark.parametrize("stat", ["", "cpu0 5 x", "cpu0 1 2 3", "nonsense\n\n"])
def test_a_strange_proc_is_read_by_psutil(stat: str, proc, monkeypatch) -> None:
    class Times(tuple):
        user, idle, iowait, steal, guest, guest_nice = 5.0, 2.0, 1.0, 3.0, 4.0, 0.5

    monkeypatch.setattr(psutil, "cpu_times", lambda: Times((5.0, 2.0, 1.0, 3.0, 4.0, 0.5)))
    assert cpu_seconds(proc(stat), Path("/nonexistent"))[:2] == (5 + 2 + 1 + 3, 5 + 3)


GROUPS = {  # the files of a control group that may use half a core and has used 6 s
    "version 2": {"cpu.max": "50000 100000\n", "cpu.stat": "usage_usec 6000000\nuser_usec 5000000\n"},
    "version 1": {
        "cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n", "cpuacct/cpuacct.usage": "6000000000\n"
    },
}  # fmt: skip


def control_group(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("version", GROUPS)
def test_neighbours_of_a_container_with_a_quota_take_nothing_from_it(version, proc, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    group = control_group(tmp_path / "cgroup", GROUPS[version])
    steal = 1.0 * 0.5 / 2  # the quota's part of what was stolen from two cores
    assert cpu_seconds(proc(STAT), group)[:2] == pytest.approx((0.5 * 100.0, 6.0 + steal))
    assert usable_cores(group) == 0.5


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "max 100000"},
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        GROUPS["version 2"] | {"cpu.max": "400000 100000"},
        GROUPS["version 2"] | {"cpu.max": ""},
    ],
)
def test_without_a_quota_below_its_cores_a_process_may_use_all_of_them(files, proc, tmp_path) -> None:
    group = control_group(tmp_path / "cgroup", files)
    assert cpu_seconds(proc(STAT), group)[:2] == cpu_seconds(proc(STAT), tmp_path / "nothing")[:2]
    assert usable_cores(group) == 2


LAUNCHED = {
    "by torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"},
    "by srun": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"},
    "by Lightning": {"LOCAL_RANK": "1"},
}


@pytest.mark.parametrize(
    ("launched", "shared", "counts"),
    [(None, True, False), *((each, True, True) for each in LAUNCHED), ("by srun", False, False)],
)
def test_the_other_ranks_of_a_run_are_its_own_where_they_share_its_cores(
    launched, shared, counts, tmp_path, monkeypatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCHED.get(launched, {}).items():
        monkeypatch.setenv(name, value)
    me, launcher, sibling = os.getpid(), os.getppid(), 4_000_000
    for pid, children in ((me, ""), (launcher, f"{me} {sibling}"), (sibling, "")):
        tasks = tmp_path / str(pid) / "task" / str(pid)
        tasks.mkdir(parents=True)
        (tasks / "children").write_text(children)
    used = {launcher: (0.0,) * 4, sibling: (30.0, 10.0, 2.0, 1.0)}
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(cpu_times=lambda: used[pid]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1} if pid == sibling and not shared else {0})
    alone = time.process_time() + sum(os.times()[2:4])
    assert cpu_seconds(tmp_path, tmp_path).own - alone == pytest.approx(43.0 if counts else 0.0, abs=1.0)


@pytest.mark.parametrize("place", ["/proc", "/nonexistent"])
def test_the_time_of_a_running_child_is_this_processs_own(place: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, deadline = own_seconds(proc=Path(place)) - time.process_time(), time.monotonic() + 60
        while own_seconds(proc=Path(place)) - time.process_time() < before + 0.1:
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
