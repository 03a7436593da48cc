"""OperationProfiler in strangers' projects: what it says of a step, and that it neither changes nor ends a training."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from batchscope.callbacks import _analysis, profile
from batchscope.callbacks.profile import OperationProfiler
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.errors import UserError
from batchscope.records.explanation import FILE, TRACE, Cost, Explanation
from tests.support.devices import CPU
from tests.support.third_party_modules import Stranger, loader, train
from tests.support.waiting import PATIENCE_S

UPDATES = 4 + 2 + 4  # of `profiler()`: warm-up, in which operations are recorded; timed; traced after one


@pytest.fixture(autouse=True)
def measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: CPU)


def monitor(**options: Any) -> ThroughputMonitor:
    return ThroughputMonitor(**{"warmup_steps": 1, "verbose": False, **options})


def profiler(**options: Any) -> OperationProfiler:
    return OperationProfiler(**{"steps": 2, "stop": True, "verbose": False, **options})


def explained(module: lightning.LightningModule | None = None, data: Any = None, **options: Any) -> Explanation:
    callback = profiler()
    train(module or Stranger(), monitor(), callback, data=data, **{"max_epochs": 10, **options})
    assert callback.explanation is not None
    return callback.explanation


def only(step: Explanation, name: str) -> Cost:
    (found,) = [cost for cost in step.operations if cost.name == name]
    return found


class Slow(Stranger):
    """Each step sleeps for 20 ms."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def test_every_operation_has_its_part_module_work_time_and_lower_bound() -> None:
    step = explained()
    forward = only(step, "aten.addmm")
    assert (forward.part, forward.module, forward.dtype, forward.calls) == ("forward", "layer", "fp32", 1)
    assert (forward.flops, forward.bytes) == (2 * 4 * 4 * 1, 4 * (4 * 4 + 4 + 1 + 4))
    assert forward.seconds > 0
    assert forward.floor_seconds == pytest.approx(1e-6)  # a launch takes longer than its work
    assert {cost.part for cost in step.operations if cost.name == "aten.mm"} == {"backward"}
    assert "optimizer" in {cost.part for cost in step.operations}


def test_the_step_is_that_of_updates_which_nothing_else_measures() -> None:
    step = explained(Slow())
    assert (step.device, step.batch_size, step.steps, step.is_timed, step.trace_steps) == ("cpu", 4, 2, True, 3)
    assert step.step_seconds >= 0.02
    assert step.outside_seconds >= 0.015


@pytest.mark.slow  # two processes import everything
def test_every_rank_ends_after_the_same_update(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.callbacks.test_profile", str(tmp_path)]
    subprocess.run(line, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=PATIENCE_S)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [f"{UPDATES} True", f"{UPDATES} False"]


def test_the_training_ends_after_the_trace_and_has_its_profiler_again() -> None:
    trainer = train(Stranger(), timed := monitor(), callback := profiler(), max_epochs=10)
    assert trainer.global_step == callback.updates(timed) == UPDATES
    assert callback.explanation is not None
    assert callback.explanation.bottleneck == timed.summary["bottleneck"]  # one verdict for one run
    assert json.loads(callback.files[FILE]) == callback.explanation.to_dict() and set(callback.files) == {FILE, TRACE}
    assert type(trainer.profiler).__name__ == "PassThroughProfiler"


def test_without_a_monitor_before_it_it_is_refused() -> None:
    with pytest.raises(UserError, match="OperationProfiler: needs a ThroughputMonitor before it"):
        train(Stranger(), profiler(), monitor())


def test_a_training_that_is_too_short_is_one_warning() -> None:
    with pytest.warns(UserWarning, match="explains no step: of 5 updates none came after the warm-up of 10"):
        train(Stranger(), monitor(warmup_steps=10), profiler(), max_epochs=1)


def test_what_is_missing_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: None)
    step = explained()
    assert step.total.floor_seconds == 0
    assert any("no lower bounds" in note for note in step.notes)


def test_without_stop_the_training_goes_on_and_is_bit_for_bit_the_same() -> None:
    weights = []
    for callbacks in ([], [monitor(), profiler(stop=False)]):
        lightning.seed_everything(0, verbose=False)
        module = Stranger()
        train(module, *callbacks, max_epochs=4)
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_training_that_ends_early_is_explained_as_far_as_it_went() -> None:
    callback = profiler()
    train(Stranger(), monitor(), callback, max_steps=6)
    assert callback.explanation is not None and callback.explanation.operations
    assert (callback.explanation.trace_steps, set(callback.files)) == (0, {FILE})
    assert "there is no trace: the training ended before it" in callback.explanation.notes


@pytest.mark.parametrize("update", [2, 8], ids=["recorded", "traced"])
def test_an_error_in_a_step_passes_and_leaves_nothing_behind(update: int) -> None:
    class Failing(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == update:
                raise RuntimeError("the step fails")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="the step fails"):
        train(Failing(), monitor(), profiler(), max_epochs=10)
    assert _get_current_dispatch_mode() is None
    assert not torch.autograd._profiler_enabled()


def test_a_failing_measurement_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "explain", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="OperationProfiler stopped measuring: ZeroDivisionError"):
        trainer = train(Stranger(), monitor(), profiler(stop=False), max_epochs=3)
    assert trainer.global_step == 15


def test_the_tables_name_modules_operations_and_what_is_outside(capsys: pytest.CaptureFixture[str]) -> None:
    train(Stranger(), monitor(), profiler(verbose=True), max_epochs=10)
    text = capsys.readouterr().out
    assert text.startswith("\nStranger, batches of 4, 32-true, on cpu (")
    names = ("layer", "optimizer", "waiting for data", "between batches", "host: Python, autograd", "the step")
    assert [name for name in ("a step takes ", *names) if f"\n{name}" not in text] == []


if __name__ == "__main__":  # one of two processes; Lightning starts the other
    own = profiler()
    done = train(Stranger(), monitor(calibrate=False), own, data=loader(200), max_epochs=10, strategy="ddp", devices=2)
    Path(sys.argv[1], str(done.global_rank)).write_text(f"{done.global_step} {own.explanation is not None}")
