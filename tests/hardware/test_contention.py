"""Who computes beside a measurement: seen in the processor's times, and in a GPU's utilisation before and after."""

import psutil
import pytest
import torch

from batchscope.hardware import contention
from batchscope.hardware.contention import WINDOW_S, Contention

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def on_cpu(total: float, busy: float, own: float) -> str | None:
    """What is found where these seconds passed on all cores."""
    readings = [(1000.0, 400.0, 20.0), (1000.0 + total, 400.0 + busy, 20.0 + own)]
    with Contention(CPU, cpu_seconds=lambda: readings.pop(0)) as others:
        pass
    return others.finding


def test_what_others_used_of_a_processor_disturbs():
    assert on_cpu(total=10.0, busy=8.0, own=4.5) == "others used 35% of the processor meanwhile"


@pytest.mark.parametrize(
    ("total", "busy", "own"),
    [
        pytest.param(10.0, 9.9, 9.8, id="all of it is this process"),
        pytest.param(10.0, 5.3, 5.0, id="the steal of an idle virtual machine"),
        pytest.param(0.0, 0.0, 0.0, id="no time passed"),
        pytest.param(10.0, 4.9, 5.0, id="clocks that tick differently"),
    ],
)
def test_a_processor_of_its_own_is_undisturbed(total, busy, own):
    assert on_cpu(total, busy, own) is None


def test_steal_is_used_by_others_and_the_time_of_guests_counts_once(monkeypatch):
    class Times(tuple):
        user, idle, iowait, steal, guest, guest_nice = 5.0, 2.0, 1.0, 3.0, 4.0, 0.5

    times = Times((5.0, 2.0, 1.0, 3.0, 4.0, 0.5))
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    total, busy, _ = contention._cpu_seconds()
    assert (total, busy) == (5 + 2 + 1 + 3, 5 + 3)


def on_gpu(*readings: float | None) -> tuple[str | None, list[float | str]]:
    """What is found where the utilisation reads like this; and everything that happened."""
    left, happened = list(readings), []

    def utilization(device: torch.device) -> float | None:
        happened.append("read")
        return left.pop(0)

    with Contention(GPU, utilization=utilization, sleep=happened.append) as others:
        happened.append("measured")
    assert not left
    return others.finding, happened


def test_a_gpu_that_idles_before_and_after_is_undisturbed():
    assert on_gpu(0.0, 98.0, 0.0) == (None, ["read", "measured", "read", WINDOW_S, "read"])


def test_what_this_process_computed_right_before_is_not_others():
    finding, happened = on_gpu(100.0, 100.0, 2.0, 98.0, 0.0)
    assert finding is None
    assert happened[:4] == ["read", "read", WINDOW_S, "read"]


def test_a_gpu_on_which_others_compute_before_is_disturbed():
    finding, _ = on_gpu(60.0, 60.0, 60.0)
    assert finding == "others kept the cuda busy 60 % of the time"


def test_a_gpu_on_which_others_began_to_compute_is_disturbed():
    finding, _ = on_gpu(0.0, 98.0, 45.0)
    assert finding == "others kept the cuda busy 45 % of the time"


def test_a_device_that_does_not_tell_is_not_waited_for():
    assert on_gpu(None, None) == (None, ["read", "measured", "read"])


@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError, AssertionError])
def test_a_gpu_whose_driver_refuses_does_not_tell(error, monkeypatch):
    def refuse(device: torch.device) -> int:
        raise error("not supported on a MIG device")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert contention._utilization(GPU) is None
