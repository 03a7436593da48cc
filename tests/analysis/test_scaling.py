"""What several devices bring: the arithmetic of a ring, and runs on one and on several devices compared."""

import pytest

from batchscope.analysis.report import write_report
from batchscope.analysis.runs import find
from batchscope.analysis.scaling import (
    Link,
    batches_to_accumulate,
    communication_share,
    doubts,
    efficiencies,
    headlines,
    predict,
    ring_ms,
    worthwhile,
)
from tests.support.synthetic_runs import write_run

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


def on(folder, devices, rate, *, threads=1, batch_size=64, seed=0, communication_ms=None):
    facts = {"samples_per_sec": rate}
    if devices > 1:
        facts |= {"processes": devices}
    if communication_ms is not None:
        facts |= {"communication_ms": communication_ms}
    options = {"trainer.devices": devices, "trainer.strategy": "ddp"}
    hardware = {"torch_threads": threads}
    write_run(folder, batch_size, 10.0, options=options, throughput=facts, hardware=hardware, seed=seed)


def test_efficiency_is_the_rate_over_that_of_as_many_single_devices(tmp_path):
    on(tmp_path / "0", 1, 1000)
    on(tmp_path / "1", 2, 1700, communication_ms=1.5)
    on(tmp_path / "2", 4, 3000)
    runs = find([tmp_path]).runs
    assert efficiencies(runs) == pytest.approx({"1": 0.85, "2": 0.75})
    assert communication_share(runs[1]) == pytest.approx(0.15)
    assert headlines(runs)[0] == (
        "cnn: 2 devices with 64 samples each do 1.70× the samples/s of one, 85% of 2×; "
        "15% of their step only waits for gradients."
    )


def test_only_runs_with_the_same_batch_for_each_device_are_compared(tmp_path):
    on(tmp_path / "0", 1, 1000, batch_size=64)
    on(tmp_path / "1", 2, 1700, batch_size=32)
    assert efficiencies(find([tmp_path]).runs) == {}


def test_of_repeated_runs_on_one_device_the_median_counts(tmp_path):
    for seed, rate in enumerate((900, 1000, 5000)):
        on(tmp_path / str(seed), 1, rate, seed=seed)
    on(tmp_path / "3", 2, 1800)
    assert efficiencies(find([tmp_path]).runs) == pytest.approx({"3": 0.9})


def test_fewer_threads_for_each_process_are_said(tmp_path):
    on(tmp_path / "0", 1, 1000, threads=2)
    on(tmp_path / "1", 2, 1000, threads=1)
    assert doubts(find([tmp_path]).runs) == ["1: each of its processes had 1 thread, and the run on one device had 2"]


def test_the_report_has_it_as_a_line_and_two_columns(tmp_path):
    on(tmp_path / "0", 1, 1000)
    on(tmp_path / "1", 2, 1700, communication_ms=1.5)
    report = write_report([tmp_path], tmp_path / "report")
    assert "2 devices with 64 samples each do 1.70×" in report.text
    header = next(line for line in report.text.splitlines() if line.startswith("run"))
    assert "of n× one %" in header and "comm %" in header
    assert "scaling_efficiency,communication_share" in (tmp_path / "report/sweep.csv").read_text()
