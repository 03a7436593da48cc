"""Who computes beside a measurement: seen in the processor's times, and in a GPU's utilisation after it."""

import math

import pytest
import torch

from batchscope.hardware import contention
from batchscope.hardware.contention import WINDOW_S, Noise, NoiseMeter, disturbance, noise_between
from batchscope.hardware.processor import Load

NAN = math.nan


@pytest.mark.parametrize(
    ("before", "after", "noise"),
    [
        pytest.param(Load(100, 40, 10), Load(110, 48, 14), (0.4, 0.2), id="others, idle"),
        pytest.param(Load(0, 0, 0), Load(10, 4.9, 5.0), (0.0, 0.51), id="clocks that tick differently"),
        pytest.param(Load(100, 40, 10), Load(100, 40, 10), (NAN, NAN), id="no time between"),
        pytest.param(Load(100, 40, 10), Load(NAN, 40, 10), (NAN, NAN), id="not known"),
    ],
)
def test_the_meter_reads_shares_of_the_time_from_one_call_to_the_next(before, after, noise, monkeypatch) -> None:
    assert noise_between(before, after) == pytest.approx(noise, nan_ok=True)
    loads = [Load(0, 0, 0), before, after]
    monkeypatch.setattr(contention, "cpu_seconds", lambda: loads.pop(0))
    meter = NoiseMeter()
    meter.read()
    assert meter.read() == pytest.approx(noise, nan_ok=True)


@pytest.mark.parametrize(
    ("noise", "finding"),
    [
        pytest.param(Noise(), None, id="nothing is known"),
        pytest.param(Noise(0.35, 0.2), "other processes used 35 % of the CPU during the measurement", id="much"),
        pytest.param(Noise(0.3, 0.5), None, id="cores that were free"),
        pytest.param(Noise(0.09, 0.0), None, id="a little, as the steal of an idle virtual machine"),
    ],
)
def test_a_processor_is_disturbed_where_others_took_more_than_they_left(noise: Noise, finding: str | None) -> None:
    assert disturbance(torch.device("cpu"), noise) == finding


@pytest.mark.parametrize(
    ("after", "waits", "finding"),
    [
        (0, [WINDOW_S], None),  # before it, it was busy with what this process computed
        (60, [WINDOW_S], "other processes kept the cuda busy 60 % of the time"),
        (None, [], None),  # a device that does not tell is not waited for
    ],
)
def test_a_gpu_on_which_others_compute_right_after_is_disturbed(after, waits, finding, nvml, monkeypatch) -> None:
    nvml.busy_pct, slept = 98, []
    nvml.refused = {"nvmlDeviceGetUtilizationRates"} if after is None else set()
    monkeypatch.setattr(contention.time, "sleep", lambda s: slept.append(s) or setattr(nvml, "busy_pct", after))
    assert disturbance(torch.device("cuda"), Noise()) == finding
    assert slept == waits
