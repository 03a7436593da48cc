"""Who computes beside a measurement: seen in the processor's times, and in a GPU's utilisation before and after."""

import psutil
import pytest
import torch

from batchscope.hardware import contention
from batchscope.hardware.contention import WINDOW_S, Contention

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def on_cpu(monkeypatch):
    """What is found where these seconds pass on all cores."""

    def watch(total: float, busy: float, own: float) -> str | None:
        readings = [(1000.0, 400.0, 20.0), (1000.0 + total, 400.0 + busy, 20.0 + own)]
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


def test_steal_is_used_by_others_and_the_time_of_guests_counts_once(monkeypatch):
    class Times(tuple):
        user, idle, iowait, steal, guest, guest_nice = 5.0, 2.0, 1.0, 3.0, 4.0, 0.5

    times = Times((5.0, 2.0, 1.0, 3.0, 4.0, 0.5))
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    total, busy, _ = contention.cpu_seconds()
    assert (total, busy) == (5 + 2 + 1 + 3, 5 + 3)


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
    assert contention.others_share((0, 0, 0), (total, busy, own)) == pytest.approx(share)
