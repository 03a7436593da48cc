"""A run that takes turns waits between two updates, and says what each turn has measured."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
from torch import Tensor

from batchscope.callbacks import _windows
from batchscope.callbacks._turns import turns_of
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.callbacks.until_known import StopWhenKnown
from batchscope.ranks import TURNS
from tests.support.third_party_modules import Stranger, loader

MIN_STEPS = 1


class Slow(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)


class Sweep(threading.Thread):
    """Gives turns as a function says, which gets `tell` and `hear`; then its ends are closed."""

    def __init__(self, does: Callable[[Callable[[str], None], Callable[[], dict[str, Any]]], None]):
        super().__init__(daemon=True)
        read, self._orders = os.pipe()
        self._answers, write = os.pipe()
        self.ends = f"{read},{write}"
        self._does = does

    def run(self) -> None:
        with os.fdopen(self._orders, "w") as orders, os.fdopen(self._answers) as answers:
            self._does(lambda line: print(line, file=orders, flush=True), lambda: json.loads(answers.readline()))


def fit(tmp_path: Path, sweep: Sweep, accumulate: int = 1, **options: Any) -> tuple[ThroughputMonitor, Any]:
    monitor = ThroughputMonitor(calibrate=False, verbose=False, record_operations=False, warmup_steps=2)
    callbacks = [monitor, StopWhenKnown(precision=5.0, seconds=0.05, min_steps=1)]
    os.environ[TURNS] = sweep.ends
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=-1, min_epochs=0, logger=False,
        callbacks=[*callbacks, *turns_of(callbacks)], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, accumulate_grad_batches=accumulate, **options,
    )  # fmt: skip
    sweep.start()
    trainer.fit(Slow(), loader())
    return monitor, trainer


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_windows, "is_disturbed", lambda *seen: False)


def test_a_run_trains_in_its_turns_and_waits_between_them(tmp_path: Path) -> None:
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
    turns = heard[2:]
    assert all(turn["steps"] >= MIN_STEPS and turn["samples"] == 4 and turn["disturbed"] is False for turn in turns)
    assert all(turn["median_s"] >= 0.005 for turn in turns)
    assert monitor.summary["ended"] == "known to ± 5 %"
    assert monitor.summary["windows"] == 2
    assert monitor.summary["updates"] == sum(turn["steps"] for turn in turns) + 2  # the first one of each turn
    times = monitor.step_times()
    assert times.pass_.tolist() == [4, 5]
    assert times.step_s.max() < 1.0  # waiting is in no step
    assert monitor.summary["samples_per_sec_fit"] > 0.3 * monitor.summary["samples_per_sec_mean"]  # nor in the fit


def one_turn(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], lightning.Trainer]:
    """What a run says of a single turn that is over at once, and its trainer."""
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


def test_a_turn_has_a_step_however_short_it_is(tmp_path: Path) -> None:
    heard, _ = one_turn(tmp_path)
    assert heard["steps"] == MIN_STEPS


def test_turns_begin_and_end_with_an_update_of_several_batches(tmp_path: Path) -> None:
    heard, trainer = one_turn(tmp_path, accumulate=2)
    assert (heard["steps"], heard["samples"]) == (MIN_STEPS, 8)
    assert trainer.global_step == 2 + 1 + MIN_STEPS


def test_a_run_whose_sweep_is_gone_waits_no_more(tmp_path: Path) -> None:
    monitor, _ = fit(tmp_path, Sweep(lambda tell, hear: None))
    assert monitor.summary["ended"] == "time limit"  # as a run alone; in a sweep a signal ends it first


def test_a_run_that_ends_by_itself_needs_no_turns(tmp_path: Path) -> None:
    monitor, trainer = fit(
        tmp_path, Sweep(lambda tell, hear: (hear(), tell("warm up"), hear(), tell("go 0 100"))), max_steps=9
    )
    assert trainer.global_step == 9
    assert "ended" not in monitor.summary


def test_turns_are_taken_only_where_a_sweep_gives_them() -> None:
    monitor = ThroughputMonitor()
    assert turns_of([monitor]) == []
    sweep = Sweep(lambda tell, hear: None)
    os.environ[TURNS] = sweep.ends
    assert len(turns_of([monitor])) == 1
    assert TURNS not in os.environ  # what the run starts takes none
    os.environ[TURNS] = sweep.ends
    assert turns_of([]) == []  # nothing measures
