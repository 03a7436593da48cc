"""A visited run waits between two updates, and says what each visit has measured."""

import time
from collections.abc import Mapping
from typing import Any

import lightning
import pytest

from batchscope.callbacks import _windows
from batchscope.callbacks._visits import seconds_waited, visits_of
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.callbacks.until_known import StopWhenKnown
from tests.callbacks.support import Slow, monitoring
from tests.support.third_party_modules import train

STOP = "stop known to ± 5 %"


class Sweep:
    """Gives these orders, each after a while, and then none any more; keeps the answers."""

    def __init__(self, *orders: str, after_s: float = 0.0):
        self.orders, self.after_s = [*orders], after_s
        self.heard: list[Mapping[str, Any]] = []

    def tell(self, facts: Mapping[str, Any]) -> None:
        self.heard.append(facts)

    def hear(self) -> str:
        time.sleep(self.after_s)
        return self.orders.pop(0) if self.orders else "null"


def fit(sweep: Sweep, **options: Any) -> tuple[ThroughputMonitor, lightning.Trainer]:
    monitor = monitoring(warmup_steps=2)
    callbacks = [monitor, StopWhenKnown(precision=5.0, seconds=0.05, min_steps=1)]
    callbacks += visits_of(callbacks, sweep)
    return monitor, train(Slow(), *callbacks, **{"max_epochs": -1, "min_epochs": 0, **options})


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_windows, "is_disturbed", lambda *seen: False)


def test_a_run_trains_while_it_is_visited_and_waits_in_between() -> None:
    sweep = Sweep("warm up", "go 4 0.1", "go 5 0.1", STOP, after_s=0.5)
    monitor, trainer = fit(sweep)
    assert sweep.heard[:2] == [{"ready": True}, {"warm": True}]
    visits = sweep.heard[2:]
    assert len(visits) == 2
    assert all(one["steps"] >= 1 and one["samples"] == 4 and one["disturbed"] is False for one in visits)
    assert all(one["median_s"] >= 0.005 for one in visits)
    summary, times = monitor.summary, monitor.step_times()
    assert (summary["ended"], summary["windows"]) == ("known to ± 5 %", 2)
    assert summary["updates"] == sum(one["steps"] for one in visits) + 2  # the first one of each visit
    assert times is not None and times.pass_.tolist() == [4, 5]
    assert times.step_s.max() < 0.5  # waiting is in no step
    assert summary["samples_per_sec_fit"] > 0.3 * summary["samples_per_sec_mean"]  # nor in the fit
    assert 2.0 <= seconds_waited(trainer.callbacks) < 4.0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_visit_is_of_whole_updates_and_has_one_however_short_it_is(accumulated: int) -> None:
    sweep = Sweep("warm up", "go 0 0", STOP)
    _, trainer = fit(sweep, accumulate_grad_batches=accumulated)
    assert (sweep.heard[2]["steps"], sweep.heard[2]["samples"]) == (1, 4 * accumulated)
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("orders", "options", "ended"),
    [
        ([], {}, "time limit"),  # as a run alone; in a sweep a signal ends it first
        (["warm up", "go 0 100"], {"max_steps": 9}, None),
    ],
    ids=["the sweep is gone", "the run ends by itself"],
)
def test_a_run_that_is_not_told_to_stop_ends_as_a_run_alone(
    orders: list[str], options: dict[str, Any], ended: str | None
) -> None:
    monitor, trainer = fit(Sweep(*orders), **options)
    assert monitor.summary.get("ended") == ended
    assert (trainer.global_step == 9) == (ended is None)


def test_a_run_waits_only_where_there_is_a_visitor_and_a_monitor() -> None:
    assert visits_of([ThroughputMonitor()], None) == visits_of([], Sweep()) == []
    assert len(visits_of([ThroughputMonitor()], Sweep())) == 1
