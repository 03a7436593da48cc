"""A timed run ends when its median step is known, when its time is up, or when a sweep that visits it says so."""

import math
import multiprocessing
import time
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from batchscope._lightning import callback_of
from batchscope.callbacks import _visits, _windows, until_known
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks._updates import Updates
from batchscope.callbacks._visits import Visits, make_visits, waiting_seconds
from batchscope.callbacks.device import DeviceMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.callbacks.until_known import StopWhenKnown, reason_to_end
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from tests.callbacks.support import Unseen, monitoring, slow
from tests.support.tables import table_of
from tests.support.third_party_modules import Stranger, loader, train


def steps_table(undisturbed: int, ms: float, disturbed: int = 0, spread: float = 0.0):
    """A table of undisturbed steps of about `ms` each, and of disturbed steps of the same length."""
    step_ms = numpy.abs(ms * (1 + spread * numpy.random.default_rng(0).normal(size=undisturbed)))
    return table_of([*step_ms, *[ms] * disturbed], disturbed_from=undisturbed)


SO_FAR = {
    "steps that are alike": (steps_table(100, 20), "known to ± 5 %"),
    "steps that vary little": (steps_table(100, 20, spread=0.05), "known to ± 5 %"),
    "steps that vary much": (steps_table(100, 20, spread=1.0), None),
    "29 steps": (steps_table(29, 50), None),
    "less than a second": (steps_table(1000, 0.9), None),
    "nine long steps": (steps_table(9, 1000), "known to ± 5 %"),
    "eight long steps": (steps_table(8, 1000), None),
    "a disturbed machine": (steps_table(0, 20, disturbed=100), None),
    "a disturbed machine, for the whole time": (steps_table(0, 20, disturbed=500), "time limit"),
    "steps that vary for the whole time": (steps_table(500, 20, spread=2.0), "time limit"),
    "five steps of nine seconds": (steps_table(5, 9000), None),
    "six steps of nine seconds": (steps_table(2, 9000, disturbed=4), "time limit"),
    "no step": (steps_table(0, 1), None),
}


@pytest.mark.parametrize("name", SO_FAR)
def test_a_run_ends_when_the_interval_of_undisturbed_steps_is_narrow_or_its_time_is_up(name: str) -> None:
    table, reason = SO_FAR[name]
    assert reason_to_end(table, precision=0.05, seconds=10, min_steps=30) == reason
    if name == "steps that are alike":
        assert reason_to_end(table, precision=0.005, seconds=10, min_steps=30) == "known to ± 0.5 %"


@pytest.fixture(autouse=True)
def short(noises, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that nothing disturbs, and short windows."""
    monkeypatch.setattr(_windows, "MIN_WINDOW_S", 0.05)


def fit(*callbacks, module=None, **options):
    return train(module or slow(), *callbacks, **{"max_epochs": -1, "min_epochs": 0, **options})


class ByHand(Stranger):
    """Steps its schedule itself, by a metric of its validation."""

    automatic_optimization = False

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    def training_step(self, batch, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["val/loss"])


def test_a_module_that_asks_for_a_metric_of_its_validation_is_timed_without_one() -> None:
    timed = monitoring()
    trainer = fit(timed, StopWhenKnown(precision=1e-9, seconds=0.05), module=ByHand())
    assert (timed.summary["ended"], trainer.current_epoch > 1) == ("time limit", True)
    assert not trainer.callback_metrics


def test_a_fit_ends_when_the_step_is_known_or_its_time_is_up_and_else_has_no_reason(monkeypatch) -> None:
    monkeypatch.setattr(until_known, "LEAST_S", 0.2)
    timed = monitoring()
    fit(timed, StopWhenKnown(precision=5.0, seconds=300, min_steps=60))
    summary = timed.summary
    assert (summary["ended"], summary["disturbed_windows"]) == ("known to ± 500 %", 0)
    assert summary["updates"] >= 60 and summary["windows"] >= 2
    low, high = summary["step_ms_interval"]
    assert 0 < low <= summary["step_ms_median"] <= high
    fit(timed, StopWhenKnown(precision=1e-9, seconds=0.2))
    assert timed.summary["ended"] == "time limit" and timed.summary["seconds"] >= 0.2
    fit(timed, StopWhenKnown(), max_steps=12)
    assert timed.summary["updates"] == 7 and "ended" not in timed.summary


def test_where_nothing_is_measured_the_clock_ends_the_fit() -> None:
    failed = monitoring()
    failed.on_train_batch_start = lambda *_: failed.disable()
    assert fit(failed, StopWhenKnown(seconds=0.1, min_steps=5)).global_step > 0


@pytest.mark.parametrize(("module", "options", "most_waited", "batches"), [
    (Unseen(), {}, 6, 7), (Stranger(), {"accumulate_grad_batches": 4}, 1, 15),
], ids=["never", "later"])  # fmt: skip
def test_where_lightning_counts_no_update_the_clock_ends_the_fit(module, options, most_waited, batches, monkeypatch):
    monkeypatch.setattr(until_known, "MOST_WAITED", most_waited)
    trainer = fit(monitoring(), StopWhenKnown(seconds=1e-6), module=module, max_epochs=3, **options)
    assert trainer.fit_loop.total_batch_idx + 1 == batches


def test_where_every_step_is_left_out_the_time_of_all_steps_ends_the_fit() -> None:
    monitor = monitoring()
    with FlopCounterMode(display=False):
        trainer = fit(monitor, StopWhenKnown(seconds=0.1), max_epochs=100)
    assert 5 + 6 <= trainer.global_step < 500
    assert monitor.summary["missing"]["bottleneck"].startswith("no step counts: each was profiled or recorded")


def test_without_a_monitor_it_is_refused() -> None:
    with pytest.raises(UserError, match="^callbacks: StopWhenKnown needs a ThroughputMonitor, and there is none$"):
        fit(StopWhenKnown())


@pytest.mark.parametrize("experiment", ["throughput", "diagnose"])
def test_what_ends_a_run_by_its_steps_stands_behind_the_monitor(experiment: str) -> None:
    (config,) = check_command_line([f"experiment={experiment}"], multirun=False)
    names = [name for name, node in config["callbacks"].items() if node]
    assert names.index("throughput") < names.index("until_known")
    assert [type(callback).__name__ for callback in make_visits([monitoring()], SimpleNamespace())] == ["Visits"]


# --- visits ---------------------------------------------------------------------------------------------------------


def visited(*orders: str, after_s: float = 0.0, timed: bool = True, also=(), **options):
    """Train under a sweep that gives these orders, each after `after_s`; returns the run's messages, its monitor and trainer."""

    def hear() -> str:
        time.sleep(after_s)
        return pending.pop(0) if pending else "null"

    messages, pending, monitor = [], [*orders], monitoring(warmup_steps=2)
    callbacks = [*also, monitor, *[StopWhenKnown(precision=5.0, seconds=0.05, min_steps=1)] * timed]
    callbacks += make_visits(callbacks, SimpleNamespace(tell=messages.append, hear=hear))
    return messages, monitor, fit(*callbacks, **options)


def test_a_run_trains_while_it_is_visited_and_waits_in_between() -> None:
    orders = ("warm up", "go 4 0.1", "go 5 0.1", "stop known to ± 5 %")
    (ready, warm, *visits), monitor, trainer = visited(*orders, after_s=0.25)
    # `fit_s` is None, because the training has no planned end.
    assert (ready["ready"], warm["warm"], warm["fit_s"], len(visits)) == (True, True, None, 2)
    assert all(visit["steps"] >= 1 and visit["samples"] == 4 and visit["disturbed"] is False for visit in visits)
    assert all(visit["mean_s"] >= 0.005 for visit in visits)
    summary, times = monitor.summary, monitor.step_times()
    assert (summary["ended"], summary["windows"]) == ("known to ± 5 %", 2)
    assert summary["updates"] == sum(visit["steps"] for visit in visits) + 2  # the first update of each visit
    assert times.pass_.tolist() == [4, 5]
    assert times.step_s.max() < 0.25  # waiting is in no step
    assert 1.0 <= waiting_seconds(trainer.callbacks) < 2.0


def test_a_timer_and_a_validation_that_is_due_by_the_clock_count_no_wait() -> None:
    module, timer, began, shifts = slow(), Timer({"hours": 1}), time.monotonic(), []
    module.configure_callbacks = lambda: [timer]
    # As Lightning has it, a fit that is to stop ends with a validation.
    module.on_validation_start = lambda: shifts.append(module.trainer._last_val_time - module.trainer._train_start_time)
    by_clock = {"val_check_interval": {"hours": 1}, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    options = {"module": module, "data": (loader(), loader()), **by_clock}
    (_, warm, _), _, trainer = visited("warm up", "go 4 0.1", "stop", after_s=0.2, **options)
    assert 3500 < warm["fit_s"] < 3600  # the Timer's limit, because the fit has no number of updates
    waited_s = waiting_seconds(trainer.callbacks)
    assert 0.6 <= waited_s <= time.monotonic() - began - timer.time_elapsed()
    assert shifts == [pytest.approx(waited_s)]


def test_a_device_monitor_samples_no_wait_and_a_visited_fit_has_no_parts_of_its_time() -> None:
    device = DeviceMonitor(interval_s=0.1)
    _, monitor, _ = visited("warm up", "go 4 0.1", "stop known", after_s=0.3, also=(device,))
    assert device.summary["seconds"] < 0.5  # of 0.9 s that the run has waited
    assert "fit_parts_s" not in monitor.summary
    fit(alone := monitoring(), StopWhenKnown(precision=5.0, seconds=0.05))
    assert "fit_parts_s" in alone.summary


def test_what_decides_when_a_run_alone_is_known_is_unread_where_a_sweep_visits_it(monkeypatch) -> None:
    def unread(trainer):
        return [*callback_of(trainer, StopWhenKnown).unread_options()]

    assert unread(visited("warm up", "go 4 0.1", "stop known")[2]) == ["precision", "min_steps"]
    assert unread(fit(monitoring(), StopWhenKnown(seconds=0.1))) == ["min_passes"]


def test_the_workers_of_a_loader_are_stopped_while_a_run_waits_so_that_no_visit_begins_with_full_buffers() -> None:
    def hear() -> str:
        time.sleep(0.05)
        statuses.append({psutil.Process(worker.pid).status() for worker in multiprocessing.active_children()})
        return pending.pop(0)

    statuses, pending, monitor = [], ["warm up", "go 4 0.05", "go 5 0.05", "stop known"], monitoring(warmup_steps=2)
    data = DataLoader(TensorDataset(torch.zeros(10_000, 4), torch.zeros(10_000, 1)), batch_size=4, num_workers=1)
    trainer = fit(monitor, *make_visits([monitor], SimpleNamespace(tell=lambda message: None, hear=hear)), data=data)
    assert statuses == [{psutil.STATUS_STOPPED}] * 4
    assert trainer.global_step > 8  # more than the worker had loaded before the first wait, so it was resumed


@pytest.mark.parametrize(
    ("limit", "long_s", "steps"),
    [(-1.0, 60.0, 3), (1.0, 60.0, 1), (-1.0, 0.0, 1)],
    ids=["waits", "does not", "is long"],
)
def test_a_visit_has_a_batch_of_each_worker_where_steps_wait_for_data_and_it_is_not_long(
    limit: float, long_s: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that have begun together are ready together: of three steps one waits for all three."""
    monkeypatch.setattr(_visits, "WAITS", limit)
    monkeypatch.setattr(_visits, "LONG_S", long_s)
    orders = ("warm up", "go 0 0", "go 1 0", "stop known")
    data = DataLoader(TensorDataset(torch.zeros(10_000, 4), torch.zeros(10_000, 1)), batch_size=8, num_workers=3)
    (_, _, first, second), *_ = visited(*orders, data=data)
    assert (first["steps"], second["steps"]) == (1, steps)


class Lagging(HostClock):
    """The clock of a device that runs behind the host; notes how far ahead it lets the host be."""

    lags = True
    marked = waited = ahead = 0

    def mark(self) -> float:
        self.marked += 1
        self.ahead = max(self.ahead, self.marked - self.waited)
        return super().mark()

    def wait(self, mark: float) -> None:
        self.waited += 1


def test_the_host_stays_near_a_device_that_lags_and_is_warm_after_updates_of_the_devices_own_length(
    monkeypatch,
) -> None:
    clock = Lagging()
    monkeypatch.setattr(_visits, "clock_for", lambda device: clock)
    messages, _, trainer = visited("warm up", "go 0 0", "stop known")
    assert messages[1]["warm"] and trainer.global_step == 2 + 4  # as without a lag, and two updates more
    assert clock.marked == trainer.global_step and clock.ahead == 3  # two updates, and the update that has just ended


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_visit_is_of_whole_updates_and_has_one_however_short_it_is(accumulated: int) -> None:
    messages, _, trainer = visited("warm up", "go 0 0", "stop known", accumulate_grad_batches=accumulated)
    assert (messages[2]["steps"], messages[2]["samples"]) == (1, 4 * accumulated)
    assert trainer.global_step == 4


def test_a_run_that_is_not_told_to_stop_ends_as_a_run_alone() -> None:
    _, monitor, _ = visited()  # the sweep is gone, and no signal ends the run
    assert monitor.summary["ended"] == "time limit"
    _, monitor, trainer = visited("warm up", "go 0 100", max_steps=9)
    assert "ended" not in monitor.summary and trainer.global_step == 9


@pytest.mark.parametrize(
    ("estimate", "max_steps", "left_s"), [(102, -1, 46.0), (10, -1, 0.0), (math.inf, -1, None), (104, 104, 12.5)]
)
def test_how_long_a_training_takes_is_told_by_the_last_updates_of_its_warm_up(
    estimate, max_steps, left_s, monkeypatch
) -> None:
    """It was resumed after eight updates. Its two optimizers step in each; `max_steps` counts each step."""
    visits = Visits(ThroughputMonitor(), None)
    visits._warm_ends.extend([9.0, 10.0, 10.5, 11.0])
    visits._updates = Updates(0)
    for step in (2, 4):
        visits._updates.end_batch(step)
    monkeypatch.setattr(_visits, "logged_step", lambda trainer: 10)
    trainer = {"estimated_stepping_batches": estimate, "max_steps": max_steps, "global_step": 54, "callbacks": []}
    assert visits._remaining_fit_s(SimpleNamespace(**trainer)) == left_s


def test_a_training_goes_on_after_its_visits_and_says_how_long_it_takes() -> None:
    (_, warm, visit), monitor, trainer = visited("warm up", "go 4 0.1", "train", timed=False, max_epochs=20)
    assert visit["steps"] >= 1 and "ended" not in monitor.summary
    assert trainer.current_epoch == 20 and warm["fit_s"] > 0
    times = monitor.step_times()
    assert times.pass_[0] == 4 and set(times.pass_[1:]) == {
        -1
    }  # after the visits the clock divides the updates into windows
