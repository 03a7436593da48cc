"""A visited run waits between two updates, and says what each visit has measured."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import pytest
from torch import Tensor

from batchscope.callbacks import _windows
from batchscope.callbacks._visits import visits_of
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.callbacks.until_known import StopWhenKnown
from tests.support.third_party_modules import Stranger, loader


class Slow(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)


class Sweep(threading.Thread):
    """Visits as a function says, which gets `tell` and `hear`; then it says nothing any more."""

    def __init__(self, does: Callable[[Callable[[str], None], Callable[[], Mapping[str, Any]]], None]):
        super().__init__(daemon=True)
        self._orders, self._answers = queue.Queue[str](), queue.Queue[Mapping[str, Any]]()
        self.hear, self.tell = self._orders.get, self._answers.put
        self._does = does

    def run(self) -> None:
        self._does(self._orders.put, self._answers.get)
        self._orders.put("null")


def fit(tmp_path: Path, sweep: Sweep, accumulate: int = 1, **options: Any) -> tuple[ThroughputMonitor, Any]:
    monitor = ThroughputMonitor(calibrate=False, verbose=False, record_operations=False, warmup_steps=2)
    callbacks = [monitor, StopWhenKnown(precision=5.0, seconds=0.05, min_steps=1)]
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=-1, min_epochs=0, logger=False,
        callbacks=[*callbacks, *visits_of(callbacks, sweep)], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, accumulate_grad_batches=accumulate, **options,
    )  # fmt: skip
    sweep.start()
    trainer.fit(Slow(), loader())
    return monitor, trainer


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_windows, "is_disturbed", lambda *seen: False)


def test_a_run_trains_while_it_is_visited_and_waits_in_between(tmp_path: Path) -> None:
    heard = []

    def does(tell: Callable, hear: Callable) -> None:
        heard.append(hear())
        tell("warm up")
        heard.append(hear())
        for number in (4, 5):
            tell(f"go {number} 0.1")
            heard.append(hear())
            time.sleep(1.0)
        tell("stop known to ± 5 %")

    monitor, _ = fit(tmp_path, Sweep(does))
    assert heard[:2] == [{"ready": True}, {"warm": True}]
    visits = heard[2:]
    assert all(one["steps"] >= 1 and one["samples"] == 4 and one["disturbed"] is False for one in visits)
    assert all(one["median_s"] >= 0.005 for one in visits)
    assert monitor.summary["ended"] == "known to ± 5 %"
    assert monitor.summary["windows"] == 2
    assert monitor.summary["updates"] == sum(one["steps"] for one in visits) + 2  # the first one of each visit
    times = monitor.step_times()
    assert times.pass_.tolist() == [4, 5]
    assert times.step_s.max() < 1.0  # waiting is in no step
    assert monitor.summary["samples_per_sec_fit"] > 0.3 * monitor.summary["samples_per_sec_mean"]  # nor in the fit


def one_visit(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], lightning.Trainer]:
    """What a run says of a single visit that is over at once, and its trainer."""
    heard = []

    def does(tell: Callable, hear: Callable) -> None:
        hear()
        tell("warm up")
        hear()
        tell("go 0 0")
        heard.append(hear())
        tell("stop known to ± 5 %")

    _, trainer = fit(tmp_path, Sweep(does), **options)
    return heard[0], trainer


def test_a_visit_has_a_step_however_short_it_is(tmp_path: Path) -> None:
    heard, _ = one_visit(tmp_path)
    assert heard["steps"] == 1


def test_visits_begin_and_end_with_an_update_of_several_batches(tmp_path: Path) -> None:
    heard, trainer = one_visit(tmp_path, accumulate=2)
    assert (heard["steps"], heard["samples"]) == (1, 8)
    assert trainer.global_step == 4


def test_a_run_whose_sweep_is_gone_waits_no_more(tmp_path: Path) -> None:
    monitor, _ = fit(tmp_path, Sweep(lambda tell, hear: None))
    assert monitor.summary["ended"] == "time limit"  # as a run alone; in a sweep a signal ends it first


def test_a_run_that_ends_by_itself_needs_no_visits(tmp_path: Path) -> None:
    monitor, trainer = fit(
        tmp_path, Sweep(lambda tell, hear: (hear(), tell("warm up"), hear(), tell("go 0 100"))), max_steps=9
    )
    assert trainer.global_step == 9
    assert "ended" not in monitor.summary


def test_a_run_waits_only_where_there_is_a_visitor_and_a_monitor() -> None:
    visitor = Sweep(lambda tell, hear: None)
    assert visits_of([ThroughputMonitor()], None) == visits_of([], visitor) == []
    assert len(visits_of([ThroughputMonitor()], visitor)) == 1
