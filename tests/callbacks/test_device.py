"""DeviceMonitor in any Lightning project: what it samples, and which time its numbers describe."""

from types import SimpleNamespace

import psutil
import pytest

from batchscope.callbacks import device
from batchscope.callbacks.device import LOGGED, DeviceMonitor
from batchscope.hardware import telemetry
from batchscope.hardware.telemetry import ALLOCATED, CPU, PEAK, PROCESSOR_TIME, RSS, Telemetry
from tests.callbacks.support import slow, stranger
from tests.support.third_party_modules import Memory, loader, train


def test_a_fit_is_logged_and_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MIN_INTERVAL_S", 0.02)  # so that the run can be short
    monkeypatch.setattr(telemetry, "MIN_SPAN_S", 0.001)
    monitor, logger, steps = DeviceMonitor(interval_s=0.02), Memory(), 40
    assert monitor.result() == {}
    train(slow(), monitor, data=loader(80), logger=logger)
    keys = {PROCESSOR_TIME, PEAK, ALLOCATED, CPU, RSS}
    assert keys <= {key for _, row in logger.rows for key in row} <= keys | set(LOGGED) | {"epoch"}
    logged = logger.steps(RSS)
    assert logged == sorted(set(logged))  # at most one value a step
    assert len(logged) >= 3 and logged[0] >= 0 and logged[-1] <= steps
    assert logger.values(PEAK) == sorted(logger.values(PEAK))
    summary = monitor.summary
    assert summary["seconds"] >= steps * 0.005
    assert summary["device/memory_allocated_max_gib"] <= summary[PEAK]
    assert summary[PEAK] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.5)
    assert 0 <= summary["device/processor_time_mean_pct"] <= 100
    assert "energy_j" not in summary and "device/power_mean_w" not in summary


def test_validation_and_waiting_are_not_training_time(world) -> None:
    """Twelve steps of a second and 1 W, and two validations of twelve at 100 W."""

    def rest(module) -> None:
        if module.global_step == 4:
            before = world.telemetry.samples
            world.now += 0.25
            monitor.pause()
            world.now += 0.25
            assert world.telemetry.samples == before + 1  # so that no sample covers training and waiting

    steps = {"training_step": lambda _: world.move(1), "validation_step": lambda _: world.move(1, watts=100)}
    module, monitor, logger, data = stranger(**steps, on_train_batch_end=rest), DeviceMonitor(), Memory(), loader(12, 1)
    options = {"val_check_interval": 6, "num_sanity_val_steps": 0, "max_epochs": 1}
    train(module, monitor, data=(data, data), logger=logger, **options)
    assert (monitor.summary["seconds"], monitor.summary["energy_j"]) == (12.25, 12)
    assert monitor.result(since=3.0)["seconds"] == 9.25
    assert logger.steps(RSS) == list(range(1, 13))


def test_what_was_sampled_is_logged_also_where_the_device_fails_with_the_fit(world, monkeypatch) -> None:
    def work(module) -> None:
        world.move(1)
        if module.global_step == 10:
            monkeypatch.setattr(device, "growth", lambda *_: 1 / 0)
            raise ValueError("the loss is odd")

    monitor, logger = DeviceMonitor(), Memory()
    with pytest.raises(ValueError, match="odd"), pytest.warns(UserWarning, match="DeviceMonitor stopped measuring"):
        train(stranger(training_step=work), monitor, data=loader(12, 1), logger=logger)
    assert logger.steps(RSS) == list(range(1, 11))


def test_memory_that_grows_all_through_a_training_is_said_and_recorded(world, monkeypatch, capsys) -> None:
    def sample(read, interval_s: float) -> Telemetry:
        world.telemetry = Telemetry(lambda: {RSS: 2 + 1e-3 * world.now}, 60, lambda: world.now)
        return world.telemetry

    monkeypatch.setattr(device, "Telemetry", sample)
    monkeypatch.setattr(device, "host_memory", lambda: SimpleNamespace(total=2**36, available=10 * 2**30))
    monitor, module = DeviceMonitor(), stranger(training_step=lambda _: world.move(1))
    train(module, monitor, data=loader(400, 1), max_epochs=1)
    grown = monitor.record_facts()["memory_growth"]["host"]
    assert grown["bytes_per_update"] == pytest.approx(1e-3 * 2**30, rel=0.01)
    (line,) = monitor.summary_lines()
    assert "the host's grows by 1 GiB in 1,000 updates, at which rate it is full in 2.8 h; usual causes: " in line
    assert capsys.readouterr().out.startswith("\nmemory  the host's grows by 1 GiB")  # not beside a progress bar
    train(module, monitor, data=loader(40, 1), max_epochs=1)
    assert (monitor.record_facts(), monitor.summary_lines()) == ({"memory_growth": None}, [])
