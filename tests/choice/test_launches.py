"""What the host takes: launches at published costs, the loop as it was measured, a host that the user names."""

import pytest

from batchscope.choice.launches import HOSTS, beside_operations, host_of, host_seconds, launched
from batchscope.errors import UserError
from tests.choice.trainings import convolution, mlp


def test_what_goes_through_cudnn_counts_for_several():
    assert launched(mlp(8)) == 16
    assert launched(convolution(8)) == 9


def test_without_a_measurement_a_launch_takes_5_to_15_us():
    seconds = host_seconds(100, None, None)
    assert (seconds.low, seconds.middle, seconds.high) == pytest.approx((5e-4, 8e-4, 15e-4))


def test_the_loop_is_added_as_it_was_measured():
    seconds = host_seconds(100, 1e-3, None)
    assert seconds.middle == pytest.approx(1e-3 + 5e-4)
    assert seconds.low < seconds.middle / 1.5 and seconds.high > 1.4 * seconds.middle


def test_a_named_host_is_known_better():
    named, unnamed = host_seconds(100, 1e-3, HOSTS["typical"]), host_seconds(100, 1e-3, None)
    assert named.middle == pytest.approx(unnamed.middle)
    assert named.high / named.low < unnamed.high / unnamed.low


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("fast", 5e-6), ("7us", 7e-6), ("12.5 µs", 12.5e-6)])
def test_a_host_is_a_name_or_a_time(text, seconds):
    assert host_of(text) == (seconds and pytest.approx(seconds))


@pytest.mark.parametrize("text", ["", "7", "7ms", "-7us", "0us", "0.1us", "99999us", "xeon", "nanus"])
def test_another_host_is_refused_in_one_line(text):
    with pytest.raises(UserError, match="host: got .* takes fast, typical, slow, or what a small operation takes"):
        host_of(text)


@pytest.mark.parametrize(("rest", "seconds"), [(-1.0, 4e-4), (0.0, 4e-4), (2e-3, 2e-3), (0.5, 1e-2)])
def test_what_operations_hide_and_what_other_processes_took_is_not_the_loop(rest, seconds):
    assert beside_operations(rest, 100) == pytest.approx(seconds)
