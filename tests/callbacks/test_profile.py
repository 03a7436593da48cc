"""OperationProfiler in strangers' projects: what it says of a step, and when it ends."""

import json
import time
from typing import Any

import lightning
import pytest
from torch import Tensor

from batchscope.callbacks.profile import OperationProfiler
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.errors import UserError
from batchscope.records.explanation import FILE, TRACE, Cost, Explanation
from tests.callbacks.support import monitoring
from tests.support.devices import CPU
from tests.support.third_party_modules import Stranger, train

UPDATES = 4 + 2 + 4  # of `profiler()`: warm-up, in which operations are recorded; timed; traced after one


def monitor(**options: Any) -> ThroughputMonitor:
    return monitoring(**{"warmup_steps": 1, "record_operations": True, **options})


def profiler(**options: Any) -> OperationProfiler:
    return OperationProfiler(**{"steps": 2, "stop": True, "verbose": False, **options})


def explained(module: lightning.LightningModule, **options: Any) -> Explanation:
    train(module, monitor(), callback := profiler(), **{"max_epochs": 10, **options})
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


def test_every_operation_has_its_part_module_work_time_and_lower_bound(measured: list[Any]) -> None:
    measured[0] = CPU
    step = explained(Slow())
    forward = only(step, "aten.addmm")
    assert (forward.part, forward.module, forward.dtype, forward.calls) == ("forward", "layer", "fp32", 1)
    assert (forward.flops, forward.bytes) == (2 * 4 * 4 * 1, 4 * (4 * 4 + 4 + 1 + 4))
    assert forward.seconds > 0
    assert forward.floor_seconds == pytest.approx(1e-6)  # a launch takes longer than its work
    assert {cost.part for cost in step.operations if cost.name == "aten.mm"} == {"backward"}
    assert "optimizer" in {cost.part for cost in step.operations}
    assert (step.device, step.batch_size, step.steps, step.is_timed, step.trace_steps) == ("cpu", 4, 2, True, 3)
    assert step.step_seconds >= 0.02
    assert step.outside_seconds >= 0.015


def test_the_training_ends_after_the_trace_and_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train(Stranger(), timed := monitor(), callback := profiler(verbose=True), max_epochs=10)
    assert trainer.global_step == callback.updates(timed) == UPDATES
    assert callback.explanation is not None
    assert callback.explanation.bottleneck == timed.summary["bottleneck"]  # one verdict for one run
    assert json.loads(callback.files[FILE]) == callback.explanation.to_dict() and set(callback.files) == {FILE, TRACE}
    text = capsys.readouterr().out
    assert text.startswith("\nStranger, batches of 4, 32-true, on cpu (")
    names = ("layer", "optimizer", "waiting for data", "between batches", "host: Python, autograd", "the step")
    assert [name for name in ("a step takes ", *names) if f"\n{name}" not in text] == []


def test_a_training_that_ends_early_is_explained_as_far_as_it_went_and_what_is_missing_is_a_note() -> None:
    train(Stranger(), monitor(), callback := profiler(), max_steps=6)
    step = callback.explanation
    assert step is not None and step.operations and step.total.floor_seconds == 0
    assert (step.trace_steps, set(callback.files)) == (0, {FILE})
    assert "there is no trace: the training ended before it" in step.notes
    assert any("no lower bounds" in note for note in step.notes)
    with pytest.warns(UserWarning, match="explains no step: of 5 updates none came after the warm-up of 10"):
        train(Stranger(), monitor(warmup_steps=10), profiler(), max_epochs=1)


def test_without_a_monitor_before_it_it_is_refused() -> None:
    with pytest.raises(UserError, match="OperationProfiler: needs a ThroughputMonitor before it"):
        train(Stranger(), profiler(), monitor())
