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
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset

from batchscope.callbacks import profile
from batchscope.callbacks.profile import OperationProfiler, UpdateTimer
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.contention import Noise
from batchscope.records.explanation import FILE, TRACE, Cost, Explanation
from tests.support.runs import SMALL, run
from tests.support.third_party_modules import Stranger, loader
from tests.support.waiting import PATIENCE_S

CALIBRATION = Calibration(
    device="cpu",
    device_name="Processor",
    driver=None,
    torch="2",
    threads=1,
    matmul_flops_per_sec={"fp32": 1e11},
    memory_bytes_per_sec=1e10,
    launch_us=1.0,
)
UPDATES = 1 + 2 + 3 + 4  # of `profiler()`: warm-up, plain, recorded, traced after one


@pytest.fixture(autouse=True)
def measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "find_calibration", lambda device, measure: CALIBRATION)
    monkeypatch.setattr(profile, "noise_between", lambda before, after: Noise())


def profiler(**options: Any) -> OperationProfiler:
    return OperationProfiler(**{"warmup_steps": 1, "steps": 2, "stop": True, "verbose": False, **options})


def fit(
    callback: OperationProfiler, module: lightning.LightningModule | None = None, samples: int = 20, **options: Any
) -> lightning.Trainer:
    """Train epochs of five steps of four samples, by default."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    known = {"max_epochs": 10, "accelerator": "cpu", "callbacks": [callback], **quiet}
    trainer = lightning.Trainer(**{**known, **options})
    trainer.fit(module or Stranger(), loader(samples))
    return trainer


def explained(module: lightning.LightningModule | None = None, **options: Any) -> Explanation:
    callback = profiler()
    fit(callback, module, **options)
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


def test_every_operation_has_its_part_module_work_time_and_floor() -> None:
    step = explained()
    forward = only(step, "aten.addmm")
    assert (forward.part, forward.module, forward.dtype, forward.calls) == ("forward", "layer", "fp32", 1)
    assert (forward.flops, forward.bytes) == (2 * 4 * 4 * 1, 4 * (4 * 4 + 4 + 1 + 4))
    assert forward.seconds > 0
    assert forward.floor_seconds == pytest.approx(1e-6)  # a launch takes longer than its work
    assert {cost.part for cost in step.operations if cost.name == "aten.mm"} == {"backward"}
    assert {cost.part for cost in step.operations if cost.name.startswith("aten._foreach")} <= {"optimizer"}
    assert "optimizer" in {cost.part for cost in step.operations}


def test_the_step_is_that_of_updates_which_nothing_else_measures() -> None:
    step = explained(Slow())
    assert (step.device, step.batch_size, step.steps, step.is_timed, step.trace_steps) == ("cpu", 4, 2, True, 3)
    assert step.step_seconds >= 0.02
    assert step.outside_seconds >= 0.015


@pytest.mark.usefixtures("alone")
def test_waiting_for_data_is_the_time_in_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            time.sleep(0.005)
            return torch.ones(4), torch.ones(1)

    monkeypatch.setattr(sys.modules[__name__], "loader", lambda samples: DataLoader(Rows(), batch_size=4))
    callback = profiler()
    trainer = fit(callback)
    step = callback.explanation
    assert step is not None and step.bottleneck is not None
    assert step.between_seconds >= step.waiting_seconds >= 0.02
    assert step.bottleneck["kind"] == "input"
    assert type(trainer.profiler).__name__ == "PassThroughProfiler"


def test_the_parts_of_an_update_add_up_to_it_without_what_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    timer = UpdateTimer()
    timer.begin_batch(is_first=True, is_timed=True)
    timer.mark("batch")
    timer.begin_batch(is_first=False, is_timed=True)  # of the same update
    timer.mark("batch")
    timer.pause()
    timer.mark("data_wait")  # for the first batch of the next epoch
    timer.begin_batch(is_first=True, is_timed=True)
    timer.mark("batch")
    timer.mark("data_wait")
    timer.begin_batch(is_first=True, is_timed=False)
    timer.mark("batch")
    assert timer.updates == [{"batch": 2, "other": 2}, {"batch": 1, "data_wait": 1, "other": 1}]


def test_with_accumulated_gradients_a_step_is_an_update_of_several_batches() -> None:
    step = explained(samples=16, accumulate_grad_batches=2)
    assert only(step, "aten.addmm").calls == 2
    assert step.batch_size == 4


def test_the_training_ends_when_all_is_known() -> None:
    callback = profiler()
    assert fit(callback).global_step == callback.updates == UPDATES


@pytest.mark.slow  # two processes import everything
def test_every_rank_ends_after_the_same_update(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.callbacks.test_profile", str(tmp_path)]
    subprocess.run(line, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=PATIENCE_S)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [f"{UPDATES} True", f"{UPDATES} False"]


def test_without_stop_the_training_goes_on_and_is_bit_for_bit_the_same() -> None:
    weights = []
    for callbacks in ([], [profiler(stop=False)]):
        lightning.seed_everything(0, verbose=False)
        module = Stranger()
        fit(profiler(), module, callbacks=callbacks, max_epochs=4)
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(*weights)


def test_it_works_with_manual_optimisation() -> None:
    class Manual(Stranger):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    step = explained(Manual())
    assert (only(step, "aten.addmm").part, only(step, "aten.addmm").calls) == ("forward", 2)


def test_the_folder_is_whole_and_an_earlier_one_stays(tmp_path: Path) -> None:
    for name in ("explain", "explain-2"):
        callback = profiler(dirpath=str(tmp_path / "explain"))
        fit(callback)
        assert callback.folder == tmp_path / name
        assert {path.name for path in callback.folder.iterdir()} == {FILE, TRACE}
        assert callback.explanation is not None
        assert json.loads((callback.folder / FILE).read_text()) == callback.explanation.to_dict()


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    callback = profiler(dirpath=str(tmp_path / "file" / "explain"))
    with pytest.warns(UserWarning, match="cannot be written"):
        fit(callback)
    assert callback.explanation is not None


def test_a_training_that_is_too_short_is_one_warning() -> None:
    with pytest.warns(UserWarning, match="has measured no step: it needs 11 updates"):
        fit(profiler(warmup_steps=10), max_epochs=1)


def test_a_training_that_ends_early_is_explained_as_far_as_it_went() -> None:
    callback = profiler()
    fit(callback, max_steps=5)
    assert callback.explanation is not None and callback.explanation.operations
    assert (callback.explanation.trace_steps, set(callback.files)) == (0, {FILE})


def test_where_another_profiler_is_active_one_line_says_so_and_the_rest_is_there() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        step = explained()
    assert "there is no trace: another profiler is active" in step.notes
    assert step.operations and step.trace_steps == 0


def test_without_a_calibration_there_is_no_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "find_calibration", lambda device, measure: None)
    step = explained()
    assert step.total.floor_seconds == 0
    assert any("no lower bounds" in note for note in step.notes)


@pytest.mark.parametrize("update", [4, 8], ids=["recorded", "traced"])
def test_an_error_in_a_step_passes_and_leaves_nothing_behind(update: int) -> None:
    class Failing(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == update:
                raise RuntimeError("the step fails")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="the step fails"):
        fit(profiler(), Failing())
    assert _get_current_dispatch_mode() is None
    assert not torch.autograd._profiler_enabled()


def test_a_failing_measurement_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(profile, "explain", fail)
    with pytest.warns(UserWarning, match="OperationProfiler stopped measuring: ZeroDivisionError"):
        trainer = fit(profiler(stop=False), max_epochs=3)
    assert trainer.global_step == 15


def test_the_tables_name_modules_operations_and_what_is_outside(capsys: pytest.CaptureFixture[str]) -> None:
    fit(profiler(verbose=True))
    text = capsys.readouterr().out
    assert text.startswith("\nStranger, batches of 4, 32-true, on cpu (")
    names = ("layer", "optimizer", "waiting for data", "between batches", "host: Python, autograd", "the step", "addmm")
    assert [name for name in ("a step takes ", *names) if f"\n{name}" not in text] == []


def test_a_compiled_module_is_timed_and_traced_but_not_counted() -> None:
    class Compiled(Stranger):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.layer._compiled_call_impl = self.layer._call_impl  # as `compile()` leaves it, without its minutes

    step = explained(Compiled())
    assert (step.operations, step.trace_steps) == ([], 3)
    assert any("compiled" in note for note in step.notes)


@pytest.mark.slow
def test_an_option_adds_it_to_a_run(tmp_path: Path) -> None:
    steps = ["callbacks.explain.steps=3", "callbacks.explain.warmup_steps=4", "+callbacks.explain.calibrate=false"]
    done = run(tmp_path, *SMALL, "callbacks=explain", *steps, "test=false", "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    assert "explain out/explain" in done.said and "costliest operations" in done.said
    assert {path.name for path in (tmp_path / "out" / "explain").iterdir()} == {FILE, TRACE}


if __name__ == "__main__":  # one of two processes; Lightning starts the other
    own = profiler(calibrate=False)
    done = fit(own, samples=200, strategy="ddp", devices=2)
    Path(sys.argv[1], str(done.global_rank)).write_text(f"{done.global_step} {own.explanation is not None}")
