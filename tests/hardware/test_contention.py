"""Who computes beside a measurement: seen in the processor's times, and in a GPU's utilisation after it."""

import math

import pytest
import torch

from batchscope.hardware import contention
from batchscope.hardware.contention import WINDOW_S, Noise, NoiseMeter, disturbance, is_disturbed, noise_between
from batchscope.hardware.processor import Load

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_noise_is_shares_of_the_time_between_two_readings() -> None:
    assert noise_between(Load(100, 40, 10), Load(110, 48, 14)) == pytest.approx((0.4, 0.2))  # others, idle


def test_clocks_that_tick_differently_give_no_negative_share() -> None:
    assert noise_between(Load(0, 0, 0), Load(10, 4.9, 5.0)).others_share == 0.0


@pytest.mark.parametrize("after", [Load(100, 40, 10), Load(90, 30, 5), Load(math.nan, 40, 10)])
def test_without_time_between_the_readings_nothing_is_known(after: Load) -> None:
    noise = noise_between(Load(100, 40, 10), after)
    assert math.isnan(noise.others_share) and math.isnan(noise.idle_share)


@pytest.mark.parametrize(
    ("noise", "disturbed"),
    [
        pytest.param(Noise(), False, id="nothing is known"),
        pytest.param(Noise(0.3, 0.2), True, id="others took more than they left"),
        pytest.param(Noise(0.3, 0.5), False, id="others took cores that were free"),
        pytest.param(Noise(0.09, 0.0), False, id="a little"),
    ],
)
def test_a_window_is_disturbed_where_others_took_more_than_they_left(noise: Noise, disturbed: bool) -> None:
    assert is_disturbed(noise) is disturbed


def test_the_meter_reads_from_one_call_to_the_next(monkeypatch) -> None:
    loads = [Load(0, 0, 0), Load(10, 9, 4), Load(20, 10, 5)]
    monkeypatch.setattr(contention, "cpu_seconds", lambda: loads.pop(0))
    meter = NoiseMeter()
    assert [meter.read() for _ in range(2)] == [(0.5, 0.1), (0.0, 0.9)]


@pytest.mark.parametrize(
    ("noise", "finding"),
    [
        (Noise(0.35, 0.2), "other processes used 35 % of the CPU during the measurement"),
        (Noise(0.03, 0.0), None),  # the steal of an idle virtual machine
    ],
)
def test_what_others_used_of_a_processor_disturbs_a_calibration(noise: Noise, finding: str | None) -> None:
    assert disturbance(CPU, noise) == finding


@pytest.mark.parametrize(
    ("readings", "waits", "finding"),
    [
        ([98.0, 0.0], [WINDOW_S], None),  # the first is what this process computed right before
        ([98.0, 60.0], [WINDOW_S], "other processes kept the cuda busy 60 % of the time"),
        ([None], [], None),  # a device that does not tell is not waited for
    ],
)
def test_a_gpu_on_which_others_compute_right_after_is_disturbed(readings, waits, finding, monkeypatch) -> None:
    left, slept = list(readings), []
    monkeypatch.setattr(contention, "utilization", lambda device: left.pop(0))
    monkeypatch.setattr(contention.time, "sleep", slept.append)
    assert disturbance(GPU, Noise()) == finding
    assert (left, slept) == ([], waits)


@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError, AssertionError])
def test_a_gpu_whose_driver_refuses_does_not_tell(error, monkeypatch) -> None:
    def refuse(device: torch.device) -> None:
        raise error("not supported on a MIG device")

    monkeypatch.setattr(contention, "gpu_queries", refuse)
    assert contention.utilization(GPU) is None
