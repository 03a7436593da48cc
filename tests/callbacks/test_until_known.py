"""StopWhenKnown: a timed run ends when its median step is known, or when its time is up, and says which."""

import time
from pathlib import Path
from typing import Any

import lightning
import numpy
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from batchscope.callbacks import _windows, until_known
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.callbacks.until_known import StopWhenKnown, reason_to_end
from batchscope.hardware.contention import Noise
from tests.support.runs import ranks, record
from tests.support.tables import table_of
from tests.support.third_party_modules import Stranger, loader


def known(undisturbed: int, ms: float, disturbed: int = 0, spread: float = 0.0) -> UpdateTable:
    """So many undisturbed steps of about so many ms, and disturbed ones of the same length."""
    step_ms = numpy.abs(ms * (1 + spread * numpy.random.default_rng(0).normal(size=undisturbed)))
    return table_of([*step_ms, *[ms] * disturbed], disturbed_from=undisturbed)


@pytest.mark.parametrize(
    ("so_far", "reason"),
    [
        pytest.param(known(100, 20), "known to ± 5 %", id="steps that are alike"),
        pytest.param(known(100, 20, spread=0.05), "known to ± 5 %", id="steps that vary little"),
        pytest.param(known(100, 20, spread=1.0), None, id="steps that vary much"),
        pytest.param(known(29, 50), None, id="29 steps"),
        pytest.param(known(1000, 0.9), None, id="less than a second"),
        pytest.param(known(9, 1000), "known to ± 5 %", id="nine long steps"),
        pytest.param(known(8, 1000), None, id="eight long steps"),
        pytest.param(known(0, 20, disturbed=100), None, id="a disturbed machine"),
        pytest.param(known(0, 20, disturbed=500), "time limit", id="a disturbed machine, for the whole time"),
        pytest.param(known(500, 20, spread=2.0), "time limit", id="steps that vary for the whole time"),
        pytest.param(known(5, 9000), None, id="five steps of nine seconds"),
        pytest.param(known(2, 9000, disturbed=4), "time limit", id="six steps of nine seconds"),
        pytest.param(known(0, 1), None, id="no step"),
    ],
)
def test_a_run_ends_when_the_interval_of_undisturbed_steps_is_narrow_or_its_time_is_up(
    so_far: UpdateTable, reason: str | None
) -> None:
    assert reason_to_end(so_far, precision=0.05, seconds=10, min_steps=30) == reason


def test_a_precision_below_a_percent_has_a_digit() -> None:
    assert reason_to_end(known(100, 20), precision=0.005, seconds=10, min_steps=30) == "known to ± 0.5 %"


@pytest.mark.slow
def test_a_run_that_stops_when_its_median_is_known_knows_it() -> None:
    """Looking again and again, and stopping at a narrow interval, costs little of the confidence."""
    held = 0
    for seed in range(150):
        random = numpy.random.default_rng(seed)
        steps = 20 * random.lognormal(0, 0.15, 800)
        ends = [end for end in range(12, 501, 12) if reason_to_end(table_of(steps[:end]), 0.05, 10, 30)]
        median = float(numpy.median(steps[: ends[0]]))
        held += abs(median / 20 - 1) <= 0.05
    assert held / 150 >= 0.93


class Quiet:
    """A machine that nothing disturbs."""

    def read(self) -> Noise:
        return Noise(others_share=0.0, idle_share=1.0)


class Slow(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)


def fit(tmp_path: Path, *callbacks: Callback, module: lightning.LightningModule | None = None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=-1, min_epochs=0, logger=False,
        callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module or Slow(), loader())
    return trainer


def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(calibrate=False, verbose=False, record_operations=False)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_windows, "NoiseMeter", Quiet)
    monkeypatch.setattr(_windows, "MIN_WINDOW_S", 0.05)


def test_a_fit_ends_when_the_step_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(until_known, "LEAST_S", 0.2)
    timed = monitor()
    fit(tmp_path, timed, StopWhenKnown(precision=5.0, seconds=300, min_steps=60))
    summary = timed.summary
    assert summary["ended"] == "known to ± 500 %"
    assert summary["updates"] >= 60
    assert summary["windows"] >= 2
    assert summary["disturbed_windows"] == 0
    low, high = summary["step_ms_interval"]
    assert 0 < low <= summary["step_ms_median"] <= high


def test_a_fit_ends_when_its_time_is_up(tmp_path: Path) -> None:
    timed = monitor()
    fit(tmp_path, timed, StopWhenKnown(precision=1e-9, seconds=0.3))
    assert timed.summary["ended"] == "time limit"
    assert timed.summary["seconds"] >= 0.3


def test_a_fit_that_ends_otherwise_has_no_reason(tmp_path: Path) -> None:
    timed = monitor()
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=12, logger=False, enable_progress_bar=False,
        callbacks=[timed, StopWhenKnown()], enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Slow(), loader())
    assert timed.summary["updates"] == 7
    assert "ended" not in timed.summary


def test_without_a_monitor_the_clock_ends_the_fit(tmp_path: Path) -> None:
    assert fit(tmp_path, StopWhenKnown(seconds=0.1)).global_step > 0


class Broken(ThroughputMonitor):
    def on_train_batch_start(self, *args: Any) -> None:
        self.disable()


def test_a_monitor_that_has_failed_leaves_it_to_the_clock(tmp_path: Path) -> None:
    timed = Broken(calibrate=False, verbose=False, record_operations=False)
    assert fit(tmp_path, timed, StopWhenKnown(seconds=0.1)).global_step > 0


class Unseen(Stranger):
    """Steps its optimizer behind Lightning's back, which counts no update."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()
        self.optimizers().optimizer.step()


def test_a_fit_without_updates_that_lightning_counts_ends_by_the_clock(tmp_path: Path) -> None:
    module = Unseen()
    assert fit(tmp_path, monitor(), StopWhenKnown(seconds=0.1, min_steps=5), module=module).global_step == 0


class Turns(Callback):
    """Gives a run two turns of ten steps, and ends it."""

    def __init__(self, timed: ThroughputMonitor):
        self.timed, self.turns = timed, []

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        if trainer.global_step % 10 == 0:
            if trainer.global_step > 10:
                self.turns.append(self.timed.end_window(trainer))
            time.sleep(0.05)  # the turn of another run
            self.timed.begin_window(trainer.global_step // 10)
            trainer.should_stop = trainer.global_step == 30


def test_a_run_that_takes_turns_is_ended_by_who_gives_them(tmp_path: Path) -> None:
    timed = monitor()
    turns = Turns(timed)
    trainer = fit(tmp_path, timed, turns, StopWhenKnown(precision=5.0, seconds=0.01, min_steps=1))
    assert trainer.global_step == 30
    assert [(turn["steps"], turn["disturbed"]) for turn in turns.turns] == [(10, False), (10, False)]
    assert all(turn["median_s"] > 0.005 for turn in turns.turns)
    times = timed.step_times()
    assert times is not None
    rounds = times.pass_.tolist()
    assert rounds[-2:] == [1, 2]
    assert [len(steps) for steps in times.of_windows()][-2:] == [10, 10]


@pytest.mark.slow
def test_all_ranks_end_after_the_same_step(tmp_path: Path) -> None:
    small = ["data=copy_memory", "data.delay=2", "data.num_train=76", "data.batch_size=8", "model=stacked_lstm"]
    small += ["model.hidden_size=8", "trainer.accelerator=cpu", "callbacks.throughput.calibrate=false"]
    small += ["callbacks.progress=null", "callbacks.until_known.seconds=0.5", "callbacks.until_known.precision=1e-6"]
    for run in ranks(tmp_path, "experiment=throughput", *small):
        assert run.end() == 0, run.complained
    found = record(tmp_path / "out")
    assert (found["status"], found["throughput"]["ended"]) == ("finished", "time limit")
    assert (tmp_path / "out" / "steps.npz").is_file()
