"""What the host takes: launches at published costs, the loop as it was measured, a host that the user names."""

import pytest

from batchscope.choice.launches import HOSTS, beside_operations, host_of, host_seconds, launched
from batchscope.choice.seconds import Interval, exactly
from batchscope.errors import UserError
from batchscope.records.operations import OperationRow
from tests.choice.trainings import convolution, mlp


def test_what_goes_through_cudnn_counts_for_several():
    assert launched(mlp(8)) == 16
    assert launched(convolution(8)) == 24


def test_without_a_measurement_a_launch_takes_5_to_15_us():
    seconds = host_seconds(100, None, None)
    assert (seconds.low, seconds.middle, seconds.high) == pytest.approx((5e-4, 8e-4, 15e-4))


def test_the_loop_is_added_as_it_was_measured():
    seconds = host_seconds(100, exactly(1e-3), None)
    assert seconds.middle == pytest.approx(1e-3 + 5e-4)
    assert seconds.low < seconds.middle / 1.5 and seconds.high > 1.4 * seconds.middle


def test_a_named_host_is_known_better():
    named, unnamed = host_seconds(100, exactly(1e-3), HOSTS["typical"]), host_seconds(100, exactly(1e-3), None)
    assert named.middle == pytest.approx(unnamed.middle)
    assert named.high / named.low < unnamed.high / unnamed.low


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("fast", 5e-6), ("7us", 7e-6), ("12.5 µs", 12.5e-6)])
def test_a_host_is_a_name_or_a_time(text, seconds):
    assert host_of(text) == (seconds and pytest.approx(seconds))


@pytest.mark.parametrize("text", ["", "7", "7ms", "-7us", "0us", "0.1us", "99999us", "xeon", "nanus"])
def test_another_host_is_refused_in_one_line(text):
    with pytest.raises(UserError, match="--host: got .* takes fast, typical, slow, or what a small operation takes"):
        host_of(text)


@pytest.mark.parametrize(("rest", "seconds"), [(-1.0, 8e-4), (0.0, 8e-4), (2e-3, 2e-3), (0.5, 1e-2)])
def test_what_operations_hide_and_what_other_processes_took_is_not_the_loop(rest, seconds):
    assert beside_operations(exactly(rest), 100).middle == pytest.approx(seconds)


def test_a_loop_that_is_known_badly_is_a_wide_interval():
    known, vague = (host_seconds(100, Interval(1e-3 / f, 1e-3, 1e-3 * f), None) for f in (1.0, 3.0))
    assert vague.middle == known.middle
    assert vague.low < known.low and vague.high > known.high


def test_a_resnet_50_takes_about_what_was_published():
    convolutions = [
        OperationRow(f"aten.{name}", "", part, "fp32", (), 53)
        for name in ("convolution", "native_batch_norm")
        for part in ("forward", "backward")
    ]
    rest = [OperationRow("aten.relu", "", "forward", "fp32", (), 420 - 4 * 53)]
    seconds = host_seconds(launched([*convolutions, *rest]), beside_operations(exactly(0.0), 420), None)
    assert seconds.low < 12e-3 and seconds.high > 20e-3  # a host of today, and one of 2017
