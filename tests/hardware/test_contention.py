"""Who computes beside a measurement: seen in the processor's times, and in a GPU's utilisation before and after."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from batchscope.hardware import contention
from batchscope.hardware.contention import (
    WINDOW_S,
    Contention,
    Load,
    Noise,
    NoiseMeter,
    cpu_seconds,
    is_disturbed,
    noise_between,
    others_share,
)
from batchscope.hardware.nvml_readings import THROTTLED, THROTTLED_BY

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def on_cpu(monkeypatch):
    """What is found where these seconds pass on all cores."""

    def watch(total: float, busy: float, own: float) -> str | None:
        readings = [Load(1000.0, 400.0, 20.0), Load(1000.0 + total, 400.0 + busy, 20.0 + own)]
        monkeypatch.setattr(contention, "cpu_seconds", lambda: readings.pop(0))
        with Contention(CPU) as others:
            pass
        return others.finding

    return watch


def test_what_others_used_of_a_processor_disturbs(on_cpu):
    assert on_cpu(total=10.0, busy=8.0, own=4.5) == "other processes used 35 % of the CPU during the measurement"


@pytest.mark.parametrize(
    ("total", "busy", "own"),
    [
        pytest.param(10.0, 9.9, 9.8, id="all of it is this process"),
        pytest.param(10.0, 5.3, 5.0, id="the steal of an idle virtual machine"),
        pytest.param(0.0, 0.0, 0.0, id="no time passed"),
        pytest.param(10.0, 4.9, 5.0, id="clocks that tick differently"),
    ],
)
def test_a_processor_of_its_own_is_undisturbed(on_cpu, total, busy, own):
    assert on_cpu(total, busy, own) is None


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


STAT = """\
cpu  99999 0 0 99999 0 0 0 0 0 0
cpu0 500 10 200 1000 50 3 2 30 400 5
cpu1 90000 0 0 0 0 0 0 0 0 0
cpu2 100 0 0 2000 0 0 0 70 0 0
intr 12345 0 9
"""


def test_the_load_is_of_the_cores_that_this_process_may_use_and_guests_count_once(proc) -> None:
    load = cpu_seconds(proc(STAT))
    assert load.busy == pytest.approx((500 + 10 + 200 + 3 + 2 + 30 + 100 + 70) / 100)
    assert load.total == pytest.approx(load.busy + (1000 + 50 + 2000) / 100)
    assert load.steal == pytest.approx(1.0)


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
    load = cpu_seconds(proc(STAT), control_group(tmp_path / "cgroup", GROUPS[version]))
    steal = 1.0 * 0.5 / 2  # of the machine's two cores
    assert load[:2] == pytest.approx((0.5 * 100.0, 6.0 + steal))
    assert load.steal == pytest.approx(steal)


@pytest.mark.parametrize(
    "files",
    [{"cpu.max": "max 100000"}, {"cpu/cpu.cfs_quota_us": "-1"}, GROUPS["version 2"] | {"cpu.max": "400000 100000"}],
)
def test_without_a_quota_below_its_cores_a_process_may_use_all_of_them(files, proc, tmp_path) -> None:
    files = files | {"cpu/cpu.cfs_period_us": "100000"} if "cpu/cpu.cfs_quota_us" in files else files
    load = cpu_seconds(proc(STAT), control_group(tmp_path / "cgroup", files))
    assert load[:2] == cpu_seconds(proc(STAT), tmp_path / "nothing")[:2]


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


@pytest.mark.parametrize("stat", ["", "cpu0 5 x", "cpu0 1 2 3", "nonsense\n\n"])
def test_a_strange_proc_is_read_by_psutil(stat: str, proc) -> None:
    assert cpu_seconds(proc(stat)).total == pytest.approx(cpu_seconds(Path("/nonexistent")).total, rel=0.01)


def test_steal_is_used_by_others_and_the_time_of_guests_counts_once_elsewhere_too(monkeypatch) -> None:
    class Times(tuple):
        user, idle, iowait, steal, guest, guest_nice = 5.0, 2.0, 1.0, 3.0, 4.0, 0.5

    times = Times((5.0, 2.0, 1.0, 3.0, 4.0, 0.5))
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    load = cpu_seconds(Path("/nonexistent"))
    assert (load.total, load.busy, load.steal) == (5 + 2 + 1 + 3, 5 + 3, 3)


@pytest.mark.parametrize("place", ["/proc", "/nonexistent"])
def test_the_time_of_a_running_child_is_this_processs_own(place: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, deadline = cpu_seconds(Path(place)).own - time.process_time(), time.monotonic() + 60
        while cpu_seconds(Path(place)).own - time.process_time() < before + 0.1:
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()


def test_noise_is_shares_of_the_time_between_two_readings() -> None:
    noise = noise_between(Load(100, 40, 10, 5), Load(110, 48, 14, 6))
    assert noise[:3] == pytest.approx((0.3, 0.1, 0.2))  # others, the hypervisor, idle


@pytest.mark.parametrize("after", [Load(100, 40, 10), Load(90, 30, 5), Load(math.nan, 40, 10)])
def test_without_time_between_the_readings_nothing_is_known(after: Load) -> None:
    noise = noise_between(Load(100, 40, 10), after)
    assert math.isnan(noise.others_share)
    assert not is_disturbed(noise)
    assert others_share(Load(100, 40, 10), after) == 0.0


@pytest.mark.parametrize(
    ("noise", "disturbed"),
    [
        pytest.param(Noise(), False, id="nothing is known"),
        pytest.param(Noise(0.3, 0.0, 0.2), True, id="others took more than they left"),
        pytest.param(Noise(0.3, 0.0, 0.5), False, id="others took cores that were free"),
        pytest.param(Noise(0.09, 0.0, 0.0), False, id="a little"),
        pytest.param(Noise(0.07, 0.05, 0.0), True, id="together with the hypervisor"),
        pytest.param(Noise(0.0, 0.11, 0.6), True, id="the hypervisor"),
        pytest.param(Noise(0.0, 0.03, 0.6), False, id="an idle virtual machine"),
        pytest.param(Noise(switches=1e6), False, id="switches are evidence, and no rule"),
        pytest.param(Noise(throttled=1.0), True, id="a hot accelerator"),
        pytest.param(Noise(throttled=0.0), False, id="a cool accelerator"),
    ],
)
def test_what_disturbs_a_stretch(noise: Noise, disturbed: bool) -> None:
    assert is_disturbed(noise) is disturbed


def test_a_slow_probe_disturbs() -> None:
    assert is_disturbed(Noise(), probe_s=1.3, usual_probe_s=1.0)
    assert not is_disturbed(Noise(), probe_s=1.2, usual_probe_s=1.0)
    assert not is_disturbed(Noise(), probe_s=1.3)
    assert not is_disturbed(Noise(), usual_probe_s=1.0)


def test_the_meter_reads_from_one_call_to_the_next(monkeypatch) -> None:
    loads = [Load(0, 0, 0), Load(10, 9, 4, 1), Load(20, 10, 5, 1)]
    monkeypatch.setattr(contention, "cpu_seconds", lambda: loads.pop(0))
    switches = [100.0, 107.0, 107.0]
    monkeypatch.setattr(contention, "_involuntary_switches", lambda: switches.pop(0))
    meter = NoiseMeter(CPU)
    first, second = meter.read(), meter.read()
    assert (first.others_share, first.steal_share, first.switches) == (pytest.approx(0.4), pytest.approx(0.1), 7)
    assert (second.others_share, second.switches) == (0, 0)
    assert math.isnan(first.throttled)


def test_heat_is_a_disturbance_the_power_limit_is_none_and_a_driver_that_refuses_ends_it() -> None:
    meter = NoiseMeter(CPU)
    readings = [{THROTTLED: 100.0, THROTTLED_BY["power"]: 100.0}, {THROTTLED_BY["thermal"]: 100.0}]
    meter._throttling = lambda: readings.pop(0)
    assert [meter.read().throttled for _ in range(2)] == [0, 1]
    assert math.isnan(meter.read().throttled)  # there is no reading left: an error
    assert math.isnan(meter.read().throttled)


@pytest.fixture
def on_gpu(monkeypatch):
    """What is found where the utilisation reads like this; and everything that happened."""

    def watch(*readings: float | None) -> tuple[str | None, list[float | str]]:
        left, happened = list(readings), []
        monkeypatch.setattr(contention, "utilization", lambda device: happened.append("read") or left.pop(0))
        monkeypatch.setattr(contention.time, "sleep", happened.append)
        with Contention(GPU) as others:
            happened.append("measured")
        assert not left
        return others.finding, happened

    return watch


def test_a_gpu_that_idles_before_and_after_is_undisturbed(on_gpu):
    assert on_gpu(0.0, 98.0, 0.0) == (None, ["read", "measured", "read", WINDOW_S, "read"])


def test_what_this_process_computed_right_before_is_not_others(on_gpu):
    finding, happened = on_gpu(100.0, 100.0, 2.0, 98.0, 0.0)
    assert finding is None
    assert happened[:4] == ["read", "read", WINDOW_S, "read"]


def test_a_gpu_on_which_others_compute_before_is_disturbed(on_gpu):
    finding, _ = on_gpu(60.0, 60.0, 60.0)
    assert finding == "other processes kept the cuda busy 60 % of the time"


def test_a_gpu_on_which_others_began_to_compute_is_disturbed(on_gpu):
    finding, _ = on_gpu(0.0, 98.0, 45.0)
    assert finding == "other processes kept the cuda busy 45 % of the time"


def test_a_device_that_does_not_tell_is_not_waited_for(on_gpu):
    assert on_gpu(None, None) == (None, ["read", "measured", "read"])


@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError, AssertionError])
def test_a_gpu_whose_driver_refuses_does_not_tell(error, monkeypatch):
    def refuse(device: torch.device) -> int:
        raise error("not supported on a MIG device")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert contention.utilization(GPU) is None


@pytest.mark.parametrize(
    ("total", "busy", "own", "share"),
    [(20, 20, 14, 0.3), (20, 16, 10, 0.0), (20, 19, 18, 0.0), (20, 16, 4, 0.6)],
    ids=["others wait with us", "cores were free", "little", "most of it"],
)
def test_others_disturb_where_no_core_is_free_and_above_half_of_the_cpu_anyhow(total, busy, own, share):
    assert contention.others_share(Load(0, 0, 0), Load(total, busy, own)) == pytest.approx(share)
