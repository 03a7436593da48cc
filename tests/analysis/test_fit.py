"""The model of a step's time: recovered where it is known, and honest where it is not."""

import numpy as np
import pytest

from batchscope.analysis.fit import fit_step_time, leave_one_out
from tests.support.synthetic_runs import overlapped, serial

SIZES = [16, 32, 64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize(("floor", "slope"), [(4, 0.03), (0.5, 0.2), (50, 0.05)])
def test_floor_and_slope_of_a_serial_device_are_recovered(floor, slope):
    fit = fit_step_time(SIZES, [serial(floor, slope)(b) for b in SIZES])
    assert fit.floor_ms == pytest.approx(floor, rel=0.01)
    assert fit.slope_ms == pytest.approx(slope, rel=0.01)
    assert fit.sharpness == 1


@pytest.mark.parametrize("p", [2, 3, 6])
def test_so_are_they_where_the_longer_hides_the_shorter(p):
    fit = fit_step_time(SIZES, [overlapped(4, 0.03, p)(b) for b in SIZES], serial=False)
    assert (fit.floor_ms, fit.slope_ms) == (pytest.approx(4, rel=0.01), pytest.approx(0.03, rel=0.01))
    assert fit.sharpness == p


def test_no_floor_and_no_slope_are_found_as_none():
    assert fit_step_time(SIZES, [0.1 * b for b in SIZES]).floor_ms == pytest.approx(0, abs=0.01)
    flat = fit_step_time(SIZES, [5.0] * len(SIZES))
    assert flat.step_ms(1e4) == pytest.approx(5, rel=0.02)
    assert flat.knee is None or flat.knee > 8 * max(SIZES)


def test_three_sizes_are_enough_and_two_are_not():
    assert fit_step_time([32, 64], [5, 6]) is None
    assert fit_step_time([32, 32, 64], [5, 5, 6]) is None
    fit = fit_step_time([32, 128, 512], [serial(4, 0.03)(b) for b in (32, 128, 512)])
    assert fit.floor_ms == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("t", [serial(4, 0.03), serial(20, 0.01), overlapped(3, 0.008)])
@pytest.mark.parametrize("seed", range(3))
def test_a_size_left_out_is_predicted_within_a_tenth_despite_noise(t, seed):
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.05, len(SIZES)))
    times = [t(b) * n for b, n in zip(SIZES, noise, strict=True)]
    assert leave_one_out(SIZES, times) <= 0.1
    assert leave_one_out(SIZES, times, serial=False) <= 0.1


def test_leaving_one_out_needs_four_sizes():
    assert leave_one_out([32, 64, 128], [5, 6, 8]) is None


def test_one_disturbed_size_does_not_bend_the_fit():
    times = [serial(4, 0.03)(b) for b in SIZES]
    times[3] *= 3
    fit = fit_step_time(SIZES, times)
    assert fit.floor_ms == pytest.approx(4, rel=0.15)
    assert fit.slope_ms == pytest.approx(0.03, rel=0.15)


@pytest.mark.parametrize("t", [serial(4, 0.03), overlapped(4, 0.03, 3)])
def test_the_knee_is_where_95_percent_of_the_maximum_is_reached(t):
    fit = fit_step_time(SIZES, [t(b) for b in SIZES])
    assert fit.samples_per_sec(fit.knee) == pytest.approx(0.95 * fit.asymptote)


def test_the_knee_of_a_serial_device_is_at_19_times_floor_over_slope():
    assert fit_step_time(SIZES, [serial(4, 0.1)(b) for b in SIZES]).knee == pytest.approx(19 * 40, rel=0.02)
