"""The processor: the time of the cores that a process may use, of the run itself and of others; and its caches."""

import math
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from batchscope import _system
from batchscope.hardware import processor
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.processor import (
    Noise,
    NoiseMeter,
    cpu_seconds,
    is_disturbed,
    own_seconds,
    usable_cores,
)

Core = namedtuple("Core", "user nice system idle iowait irq softirq steal guest guest_nice")
CORES = [  # `user` and `nice` include guests
    Core(5.0, 0.1, 2.0, 10.0, 0.5, 0.03, 0.02, 0.3, 4.0, 0.05),
    Core(900.0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    Core(1.0, 0, 0, 20.0, 0, 0, 0, 0.7, 0, 0),
]
BUSY_S = (5.0 + 0.1 + 2.0 + 0.03 + 0.02 + 0.3) + (1.0 + 0.7)
TOTAL_S = BUSY_S + 10.0 + 0.5 + 20.0
STEAL_S = 1.0 * 0.5 / 2  # the quota's part of what was stolen from two cores


@pytest.fixture(autouse=True)
def two_of_three_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use the cores 0 and 2, without a control group, 100 s after the start of the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: CORES)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(_system, "PROC", tmp_path / "proc")
    monkeypatch.setattr(_system, "GROUPS", tmp_path)
    monkeypatch.setattr(_system, "CPUS", tmp_path / "cpus")


class CpuTimes:
    """A fake psutil.Process with these CPU times."""

    def __init__(self, *seconds: float):
        self.cpu_times = lambda: seconds


TIME, HALF = (TOTAL_S, BUSY_S), (0.5 * 100.0, 6.0 + STEAL_S)


def v2(quota: str, usage: int = 6_000_000) -> dict[str, str]:
    return {"cpu.max": f"{quota}\n", "cpu.stat": f"usage_usec {usage}\nuser_usec 5000000\n"}


QUOTAS = {  # the process's groups, files by group → seconds of the cores in all and busy, and the usable cores
    "steal counts, and guests once": (None, {}, TIME, 2),
    "neighbours take nothing from a quota": ("0::/", {"": v2("50000 100000")}, HALF, 0.5),
    "no quota": ("0::/", {"": v2("max 100000")}, TIME, 2),
    "a quota above the cores": ("0::/", {"": v2("400000 100000")}, TIME, 2),
    "of a slice above": ("0::/a/job", {"a/job": v2("90000 100000", 1), "a": v2("50000 100000")}, HALF, 0.5),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_time_is_that_of_the_usable_cores_or_of_the_lowest_quota(name, tmp_path):
    membership, groups, total_and_busy, cores = QUOTAS[name]
    if membership is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(f"{membership}\n")
    for group, files in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (tmp_path / group / file).write_text(content)
    assert cpu_seconds()[:2] == pytest.approx(total_and_busy)
    assert usable_cores() == cores


def test_a_thread_that_is_bound_to_one_core_tells_the_cores_of_all_threads(tmp_path, monkeypatch):
    """As under OMP_PROC_BIND, whose threads, the main one among them, have a core each."""
    for thread in (11, 12):
        (tmp_path / "proc" / "self" / "task" / str(thread)).mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", {0: {0}, 11: {0}, 12: {2}}.__getitem__)
    assert usable_cores() == 2


@pytest.mark.parametrize(
    ("online", "usable", "busy_s"),
    [
        ("0-2", {0, 2}, BUSY_S),
        ("0,2-3", {0, 3}, BUSY_S),
        ("0,4,6", {4}, 900),
        ("0-7", {0, 2}, BUSY_S + 900),  # the machine's, where a container has a list of its own
        (None, {0, 4}, BUSY_S + 900),
    ],
)
def test_the_time_is_by_the_numbers_of_the_online_cores_and_else_that_of_the_whole_machine(
    online, usable, busy_s, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable)
    if online is not None:
        (tmp_path / "cpus").mkdir()
        (tmp_path / "cpus" / "online").write_text(f"{online}\n")
    assert cpu_seconds()[1] == pytest.approx(busy_s)


def test_a_system_that_does_not_tell_the_time_of_its_cores_has_no_known_load(monkeypatch):
    def refuse(percpu):
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    assert all(map(math.isnan, NoiseMeter().read()))


@pytest.mark.parametrize(
    ("launched", "is_counted"),
    [({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}, True), ({"LOCAL_RANK": "1"}, True), ({}, False)],
)
def test_other_ranks_of_a_run_are_its_own(launched, is_counted, tmp_path, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    own_pid, launcher, sibling = os.getpid(), os.getppid(), 4_000_000
    for pid, children in ((own_pid, ""), (launcher, f"{own_pid} {sibling}"), (sibling, "")):
        tasks = tmp_path / str(pid) / "task" / str(pid)
        tasks.mkdir(parents=True)
        (tasks / "children").write_text(children)
    processes = {launcher: CpuTimes(0.0), sibling: CpuTimes(30.0, 10.0, 2.0, 1.0)}
    monkeypatch.setattr(psutil, "Process", processes.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(_system, "PROC", tmp_path)
    own_s = time.process_time() + sum(os.times()[2:4])
    assert cpu_seconds()[2] - own_s == pytest.approx(43.0 if is_counted else 0.0, abs=1.0)


@pytest.mark.parametrize("place", ["/proc", "/nonexistent"])
def test_the_time_of_a_running_child_is_this_processs_own(place, monkeypatch):
    monkeypatch.setattr(_system, "PROC", Path(place))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        before, deadline = own_seconds() - time.process_time(), time.perf_counter() + 60
        while own_seconds() - time.process_time() < before + 0.03 and time.perf_counter() < deadline:
            pass
        child.kill()
    assert time.perf_counter() < deadline


def test_where_no_parent_has_the_time_of_an_ended_child_it_is_what_was_read_last(monkeypatch):
    """As on Windows, where a loader may start its workers in each epoch."""
    processes, alive = {1: CpuTimes(30.0, 10.0), 2: CpuTimes(5.0)}, [1, 2]
    monkeypatch.setattr(_system, "PARENTS_KEEP_TIMES", False)
    monkeypatch.setattr(_system, "descendants", lambda root: alive)
    monkeypatch.setattr(psutil, "Process", processes.__getitem__)
    before = own_seconds()
    alive.remove(1)
    processes[2].cpu_times = lambda: (9.0,)
    assert own_seconds() - before == pytest.approx(4.0, abs=1.0)


MIB = 2**20
CHIPLETS = (2, "1024K", 1), (3, "32768K", 8)  # caches: the level, the size, and how many cores share one


@pytest.mark.parametrize(
    ("cores", "threads", "caches", "mib"),
    [
        ({2, 3, 4}, 3, ((2, "512K", 1), (3, "32768K", 2)), 1.5 + 64),  # each core that the process may use adds its L2
        (set(range(16)), 1, CHIPLETS, 1 + 32),  # one thread, one of each level
        (set(range(16)), 4, CHIPLETS, 4 + 64),  # threads on two chiplets
        ({0, 1}, 2, ((2, "many", 1),), None),
    ],
)
def test_a_processor_has_the_l2_and_l3_that_its_threads_can_reach(cores, threads, caches, mib, tmp_path, monkeypatch):
    for core in range(16):
        levels = [(1, "Instruction", "32K", 1), *((level, "Unified", size, share) for level, size, share in caches)]
        for index, (*values, share) in enumerate(levels):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in zip(("level", "type", "size", "shared_cpu_list"), (*values, core // share), strict=True):
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert cache_bytes(torch.device("cpu"), tmp_path) == (mib and mib * MIB)


def test_a_gpu_has_its_l2_and_what_tells_nothing_has_no_known_cache(tmp_path, monkeypatch):
    for properties, size in (({"L2_cache_size": 50 * MIB}, 50 * MIB), ({}, None)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, given=properties: SimpleNamespace(**given))
        assert cache_bytes(torch.device("cuda")) == size
    assert cache_bytes(torch.device("mps")) is cache_bytes(torch.device("cpu"), tmp_path) is None


@pytest.mark.parametrize(
    ("before", "after", "noise"),
    [
        ((100, 40, 10), (110, 48, 14), (0.4, 0.2)),  # the share of others, and the idle share
        ((0, 0, 0), (10, 4.9, 5.0), (0.0, 0.51)),  # clocks that tick differently
        ((100, 40, 10), (100, 40, 10), (math.nan, math.nan)),
        ((100, 40, 10), (math.nan, 40, 10), (math.nan, math.nan)),
    ],
)
def test_the_meter_reads_shares_of_the_time_from_one_call_to_the_next(before, after, noise, monkeypatch):
    loads = [(0, 0, 0), before, after]
    monkeypatch.setattr(processor, "cpu_seconds", lambda: loads.pop(0))
    meter = NoiseMeter()
    meter.read()
    assert meter.read() == pytest.approx(noise, nan_ok=True)


@pytest.mark.parametrize(
    ("noise", "disturbed"),
    [
        pytest.param(Noise(), False, id="nothing is known"),
        pytest.param(Noise(0.35, 0.2), True, id="much"),
        pytest.param(Noise(0.3, 0.5), False, id="cores that were free"),
        pytest.param(Noise(0.09, 0.0), False, id="a little, as the steal of an idle virtual machine"),
    ],
)
def test_a_processor_is_disturbed_where_others_took_more_than_they_left(noise, disturbed):
    assert is_disturbed(noise) == disturbed
