"""Processor time: of the cores that a process may use, of the run itself, and within a container's quota."""

import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from batchscope.hardware import processor
from batchscope.hardware.processor import cpu_seconds, own_seconds, usable_cores

Core = namedtuple("Core", "user nice system idle iowait irq softirq steal guest guest_nice")
CORES = [  # guests are in `user` and `nice`, too
    Core(5.0, 0.1, 2.0, 10.0, 0.5, 0.03, 0.02, 0.3, 4.0, 0.05),
    Core(900.0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    Core(1.0, 0, 0, 20.0, 0, 0, 0, 0.7, 0, 0),
]
BUSY_S = (5.0 + 0.1 + 2.0 + 0.03 + 0.02 + 0.3) + (1.0 + 0.7)


@pytest.fixture(autouse=True)
def two_of_three_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use the cores 0 and 2, without a control group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: CORES)
    monkeypatch.setattr(processor, "CGROUP", tmp_path / "cgroup")


def test_the_time_is_that_of_the_usable_cores_with_steal_and_guests_once() -> None:
    assert cpu_seconds()[:2] == pytest.approx((BUSY_S + 10.0 + 0.5 + 20.0, BUSY_S))


def test_where_other_cores_are_offline_the_whole_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4})
    assert cpu_seconds()[1] == pytest.approx(BUSY_S + 900)


QUOTA = {"cpu.max": "50000 100000\n", "cpu.stat": "usage_usec 6000000\nuser_usec 5000000\n"}  # half a core, 6 s used


def control_group(files: dict[str, str]) -> None:
    processor.CGROUP.mkdir()
    for name, text in files.items():
        (processor.CGROUP / name).write_text(text)


def test_neighbours_of_a_container_with_a_quota_take_nothing_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    control_group(QUOTA)
    steal = 1.0 * 0.5 / 2  # the quota's part of what was stolen from two cores
    assert cpu_seconds()[:2] == pytest.approx((0.5 * 100.0, 6.0 + steal))
    assert usable_cores() == 0.5


@pytest.mark.parametrize("quota", ["max 100000", "400000 100000", ""])
def test_without_a_quota_below_its_cores_a_process_may_use_all_of_them(quota: str) -> None:
    expected = cpu_seconds()[:2]
    control_group(QUOTA | {"cpu.max": quota})
    assert cpu_seconds()[:2] == expected
    assert usable_cores() == 2


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
    monkeypatch.setattr(processor, "PROC", tmp_path)
    alone = time.process_time() + sum(os.times()[2:4])
    assert cpu_seconds().own - alone == pytest.approx(43.0 if counts else 0.0, abs=1.0)


@pytest.mark.parametrize("place", ["/proc", "/nonexistent"])
def test_the_time_of_a_running_child_is_this_processs_own(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "PROC", Path(place))
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, deadline = own_seconds() - time.process_time(), time.monotonic() + 60
        while own_seconds() - time.process_time() < before + 0.1:
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
