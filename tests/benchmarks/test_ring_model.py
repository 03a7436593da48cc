"""The model of multi-device steps: the arithmetic of a ring, and what follows from it."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "ring_model", Path(__file__).resolve().parents[2] / "benchmarks" / "ring_model.py"
)
ring_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ring_model)

Link, predict, ring_ms = ring_model.Link, ring_model.predict, ring_model.ring_ms
batches_to_accumulate, worthwhile = ring_model.batches_to_accumulate, ring_model.worthwhile

LINK = Link(bytes_per_sec=1e9, latency_ms=0.5)
LINK_AT_ONCE = Link(bytes_per_sec=1e9, latency_ms=0.0)


def serial(batch_size: float) -> float:
    return 4 + 0.1 * batch_size


def test_one_device_exchanges_nothing():
    assert ring_ms(1e9, 1, LINK) == 0


def test_two_devices_send_their_gradients_once_in_two_messages():
    assert ring_ms(1e6, 2, LINK) == pytest.approx(1 + 2 * 0.5)


def test_a_large_ring_sends_twice_the_gradients_and_waits_for_every_hop():
    assert ring_ms(1e6, 1000, LINK_AT_ONCE) == pytest.approx(2 * 0.999)
    assert ring_ms(0, 1000, LINK) == pytest.approx(999.0)


def test_with_a_batch_for_each_device_only_the_exchange_is_added():
    found = predict(serial, 1e6, 2, LINK, per_device=160)
    assert (found.batch_size, found.step_ms, found.communication_ms) == (160, pytest.approx(22), pytest.approx(2))
    assert found.efficiency == pytest.approx(20 / 22)


def test_with_a_batch_for_all_the_floor_of_a_step_is_not_divided():
    found = predict(serial, 0, 4, LINK_AT_ONCE, in_all=160)
    assert found.step_ms == pytest.approx(4 + 0.1 * 40)
    assert found.efficiency == pytest.approx(20 / (4 * 8))


def test_a_device_without_a_sample_is_no_prediction():
    assert predict(serial, 1e6, 64, LINK, in_all=32) is None


def test_devices_are_worthwhile_while_at_least_half_of_them_is_used():
    link = Link(bytes_per_sec=1e12, latency_ms=0.1)
    most = worthwhile(lambda n: predict(serial, 0, n, link, per_device=160))
    assert most == 64  # 2 · 63 · 0.1 ms are less than the step of 20 ms, and 2 · 127 · 0.1 ms are more


def test_there_are_no_more_devices_than_samples():
    assert worthwhile(lambda n: predict(lambda batch_size: 0.1 * batch_size, 0, n, LINK_AT_ONCE, in_all=8)) == 8


@pytest.mark.parametrize("efficiency", [0.5, 0.9])
def test_accumulating_batches_brings_the_efficiency_asked_for(efficiency):
    count = batches_to_accumulate(10.0, 25.0, efficiency)
    assert count * 10 / (count * 10 + 25) >= efficiency
    assert (count - 1) * 10 / ((count - 1) * 10 + 25) < efficiency
