"""StopWhenKnown: a timed run ends when its median step is known, or when its time is up, and says which."""

from typing import Any

import lightning
import numpy
import pytest
from lightning.pytorch.callbacks import Callback

from batchscope.callbacks import _windows, until_known
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.callbacks.until_known import StopWhenKnown, reason_to_end
from batchscope.hardware.contention import Noise
from tests.callbacks.support import Slow, monitoring
from tests.support.tables import table_of
from tests.support.third_party_modules import Stranger, train


def known(undisturbed: int, ms: float, disturbed: int = 0, spread: float = 0.0) -> UpdateTable:
    """So many undisturbed steps of about so many ms, and disturbed ones of the same length."""
    step_ms = numpy.abs(ms * (1 + spread * numpy.random.default_rng(0).normal(size=undisturbed)))
    return table_of([*step_ms, *[ms] * disturbed], disturbed_from=undisturbed)


SO_FAR = {
    "steps that are alike": (known(100, 20), "known to ± 5 %"),
    "steps that vary little": (known(100, 20, spread=0.05), "known to ± 5 %"),
    "steps that vary much": (known(100, 20, spread=1.0), None),
    "29 steps": (known(29, 50), None),
    "less than a second": (known(1000, 0.9), None),
    "nine long steps": (known(9, 1000), "known to ± 5 %"),
    "eight long steps": (known(8, 1000), None),
    "a disturbed machine": (known(0, 20, disturbed=100), None),
    "a disturbed machine, for the whole time": (known(0, 20, disturbed=500), "time limit"),
    "steps that vary for the whole time": (known(500, 20, spread=2.0), "time limit"),
    "five steps of nine seconds": (known(5, 9000), None),
    "six steps of nine seconds": (known(2, 9000, disturbed=4), "time limit"),
    "no step": (known(0, 1), None),
}


@pytest.mark.parametrize("name", SO_FAR)
def test_a_run_ends_when_the_interval_of_undisturbed_steps_is_narrow_or_its_time_is_up(name: str) -> None:
    table, reason = SO_FAR[name]
    assert reason_to_end(table, precision=0.05, seconds=10, min_steps=30) == reason
    if name == "steps that are alike":
        assert reason_to_end(table, precision=0.005, seconds=10, min_steps=30) == "known to ± 0.5 %"


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


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that nothing disturbs, and short windows."""

    class Quiet:
        def read(self) -> Noise:
            return Noise(others_share=0.0, idle_share=1.0)

    monkeypatch.setattr(_windows, "NoiseMeter", Quiet)
    monkeypatch.setattr(_windows, "MIN_WINDOW_S", 0.05)


class Unseen(Stranger):
    """Steps its optimizer behind Lightning's back, which counts no update."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()
        self.optimizers().optimizer.step()


class Broken(ThroughputMonitor):
    def on_train_batch_start(self, *args: Any) -> None:
        self.disable()


def fit(*callbacks: Callback, module: Any = None, **options: Any) -> lightning.Trainer:
    return train(module or Slow(), *callbacks, **{"max_epochs": -1, "min_epochs": 0, **options})


def test_a_fit_ends_when_the_step_is_known_or_its_time_is_up_and_else_has_no_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(until_known, "LEAST_S", 0.1)
    timed = monitoring()
    fit(timed, StopWhenKnown(precision=5.0, seconds=300, min_steps=20))
    summary = timed.summary
    assert (summary["ended"], summary["disturbed_windows"]) == ("known to ± 500 %", 0)
    assert summary["updates"] >= 20 and summary["windows"] >= 2
    low, high = summary["step_ms_interval"]
    assert 0 < low <= summary["step_ms_median"] <= high
    fit(timed, StopWhenKnown(precision=1e-9, seconds=0.2))
    assert timed.summary["ended"] == "time limit" and timed.summary["seconds"] >= 0.2
    fit(timed, StopWhenKnown(), max_steps=12)
    assert timed.summary["updates"] == 7 and "ended" not in timed.summary


@pytest.mark.parametrize(
    ("monitors", "module", "steps"),
    [([], Slow, True), ([Broken(calibrate=False, verbose=False)], Slow, True), ([monitoring()], Unseen, False)],
    ids=["no monitor", "one that has failed", "updates that Lightning does not count"],
)
def test_where_nothing_is_measured_the_clock_ends_the_fit(monitors: list[Any], module: Any, steps: bool) -> None:
    assert (fit(*monitors, StopWhenKnown(seconds=0.1, min_steps=5), module=module()).global_step > 0) == steps
