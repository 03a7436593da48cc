"""The speed probe: the time of a fixed product, now and then."""

import math

import pytest
import torch

from batchscope.hardware.operations import OperationRecorder
from batchscope.hardware.speed_probe import MAX_SHARE, SpeedProbe


class FakeClock:
    """Goes on by a second of training at each reading, and by these seconds at each product."""

    def __init__(self, *steps: float):
        self.now, self.steps = 1000.0, list(steps)

    def __call__(self) -> float:
        if self.steps:
            self.now += self.steps.pop(0)
        return self.now


def test_a_reading_is_the_median_of_three() -> None:
    probe = SpeedProbe(torch.device("cpu"), FakeClock(0, 9, 0, 0.5, 4.0, 1.0))
    assert probe.read() == pytest.approx(1.0)


def test_it_takes_its_share_of_the_time_and_no_more() -> None:
    clock = FakeClock(0, 10, 0, 0.1, 0.1, 0.1)
    probe = SpeedProbe(torch.device("cpu"), clock)
    assert probe.read() == pytest.approx(0.1)
    clock.now += 0.29 / MAX_SHARE - 10
    assert math.isnan(probe.read())
    clock.now += 0.02 / MAX_SHARE
    clock.steps = [0, 0, 0.1, 0.1, 0.1]
    assert probe.read() == pytest.approx(0.1)


@pytest.mark.parametrize("jump", [-5.0, math.nan, 0.0])
def test_a_clock_that_jumps_gives_no_reading(jump: float) -> None:
    probe = SpeedProbe(torch.device("cpu"), FakeClock(0, 0, 0, jump, jump, jump))
    assert math.isnan(probe.read())


def test_an_accelerator_is_not_waited_for() -> None:
    assert math.isnan(SpeedProbe(torch.device("meta")).read())


def test_no_operation_of_it_is_recorded_as_the_steps() -> None:
    probe = SpeedProbe(torch.device("cpu"))
    with OperationRecorder():
        assert math.isnan(probe.read())
    assert probe.read() > 0


def test_random_numbers_and_gradients_know_nothing_of_it() -> None:
    state = torch.get_rng_state()
    assert SpeedProbe(torch.device("cpu")).read() > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
