"""The operations of three steps are recorded in the run itself: which steps, their FLOPs, their record, and when not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks import ThroughputMonitor
from batchscope.callbacks._analysis import step_operations
from batchscope.hardware import operations
from batchscope.hardware.calibration import Calibration
from batchscope.records.operations import OperationRow
from tests.support.third_party_modules import train

BATCH, STEPS = 4, 12
pytestmark = pytest.mark.usefixtures("alone")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def fit(
    module: LightningModule, *callbacks: Callback, steps: int = STEPS, record: bool = True, **options: Any
) -> ThroughputMonitor:
    """Train on alike batches, compiled if the module is."""
    monitor = ThroughputMonitor(calibrate=False, verbose=False, record_operations=record)
    data = DataLoader(TensorDataset(torch.ones(BATCH * 40, 8)), batch_size=BATCH)
    train(module, monitor, *callbacks, data=data, max_steps=steps, **options)
    return monitor


@pytest.fixture
def recorded_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of every operation that is noted, in order."""
    seen: list[str] = []
    note = operations.OperationRecorder._note

    def noted(self: Any, func: Any, *args: Any) -> None:
        seen.append(func.overloadpacket.__name__)
        note(self, func, *args)

    monkeypatch.setattr(operations.OperationRecorder, "_note", noted)
    return seen


class Growing(Net):
    """A module whose steps do 30 products of 384×384 from some batch on, and nearly nothing before."""

    def __init__(self, grows_at: int) -> None:
        super().__init__()
        self.grows_at = grows_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx >= self.grows_at:
            x = torch.ones(384, 384)
            for _ in range(30):
                x @ x
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("steps", "accumulated"), [(STEPS, 1), (STEPS, 3), (40, 1)])
def test_every_batch_of_three_updates_after_the_first_is_recorded_once(
    steps: int, accumulated: int, recorded_in: list[str]
) -> None:
    fit(Net(), steps=steps, accumulate_grad_batches=accumulated)
    assert recorded_in.count("addmm") == 3 * accumulated * 2


def test_recorded_steps_are_in_no_rate() -> None:
    assert fit(Net()).summary["updates"] == STEPS - 5  # the warm-up holds them
    assert "samples_per_sec" not in fit(Net(), steps=4).summary


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_flops_of_a_sample_are_those_of_the_recorded_updates(accumulated: int) -> None:
    found = fit(Net(), accumulate_grad_batches=accumulated).summary
    assert found["flops_per_sample"] == 3 * (2 * 8 * 16 + 2 * 16 * 2) - 2 * 8 * 16


def test_recording_changes_no_bit_of_a_fit_also_where_it_is_resumed_at_update_3(tmp_path: Path) -> None:
    def weights(*callbacks: Callback, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        lightning.seed_everything(0, verbose=False)
        module = Net()
        monitor = fit(module, *callbacks, **options)
        return torch.cat([each.flatten() for each in module.parameters()]), monitor.summary

    whole, summary = weights()
    plain, _ = weights(record=False)
    weights(Save(tmp_path / "3.ckpt"), steps=3)
    resumed, again = weights(ckpt_path=tmp_path / "3.ckpt")
    assert torch.equal(whole, plain) and torch.equal(whole, resumed)
    assert again["flops_per_sample"] == summary["flops_per_sample"] > 0


# --- what is no evidence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grows_at", [6, 12])
def test_steps_that_change_later_make_the_verdict_unclear_and_leave_no_flops(grows_at: int) -> None:
    found = fit(Growing(grows_at), steps=24).summary
    assert found["bottleneck"]["kind"] == "unclear"
    assert "because the steps changed: the median step takes" in found["bottleneck"]["evidence"]
    assert "flops_per_sample" not in found
    assert found["missing"]["mfu"] == "the steps have changed since their FLOPs were recorded"


def test_updates_of_different_flops_leave_none() -> None:
    class Lengths(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0].repeat(1 + batch_idx, 1)).square().mean()

    with pytest.warns(UserWarning, match="The FLOPs of Lengths cannot be counted"):
        found = fit(Lengths()).summary
    assert found["missing"]["mfu"] == "the recorded updates take different numbers of FLOPs a sample"


def test_an_operation_that_cannot_be_noted_ends_the_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations.OperationRecorder, "_note", lambda *_: 1 / 0)
    found = fit(Net()).summary
    assert found["updates"] == STEPS - 5
    assert "ZeroDivisionError" in found["missing"]["flops_per_sec"]


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ValueError("the user's own")
        return super().training_step(batch, batch_idx)


class Counting(Callback):
    """Begins and ends a recorder of its own in every step."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.counter = operations.OperationRecorder()
        self.counter.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.counter.__exit__(None, None, None)


@pytest.mark.parametrize(("module", "callbacks"), [(Failing, []), (Net, [Counting()])], ids=["fails", "another's"])
def test_no_recorder_is_left_behind(module: Any, callbacks: list[Callback], recorded_in: list[str]) -> None:
    if module is Failing:
        with pytest.raises(ValueError, match="the user's own"):
            fit(module(), *callbacks)
    else:
        fit(module(), *callbacks)
    seen = len(recorded_in)
    torch.ones(2).add(1)
    assert len(recorded_in) == seen


# --- compiled modules -------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Iterator[None]:
    """Afterwards this process has compiled nothing."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(module: Net) -> Net:
    module.net.compile(backend="eager")
    return module


@pytest.mark.usefixtures("compiler")
def test_a_compiled_module_takes_three_eager_updates_for_its_flops_and_has_no_operations(tmp_path: Path) -> None:
    plain, found = fit(Net()).summary, fit(compiled(Net())).summary
    assert found["flops_per_sample"] == plain["flops_per_sample"] > 0
    assert found["step"] == {"not_recorded": "the step is compiled"}
    fit(Net(), Save(tmp_path / "6.ckpt"), steps=6)
    found = fit(compiled(Net()), ckpt_path=tmp_path / "6.ckpt").summary
    assert found["missing"]["mfu"].startswith("the training was resumed after update 4")


@pytest.mark.usefixtures("compiler")
def test_a_compiled_training_runs_the_same_updates_uncompiled_after_a_stop(
    recorded_in: list[str], tmp_path: Path
) -> None:
    class TwoOptimizers(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.net(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[n].parameters(), lr=0.1) for n in (0, 2)]

    fit(compiled(TwoOptimizers()))
    whole = len(recorded_in)
    fit(TwoOptimizers(), Save(tmp_path / "1.ckpt"), steps=2)  # one batch
    recorded_in.clear()
    fit(compiled(TwoOptimizers()), ckpt_path=tmp_path / "1.ckpt")
    assert len(recorded_in) == whole > 0


# --- the record of a step ---------------------------------------------------------------------------------------------


def test_the_record_of_a_step_has_its_operations_with_parts_and_dimensions() -> None:
    monitor = fit(Net())
    step, facts = monitor.operations, monitor.summary["step"]
    assert step is not None
    assert (step.batch_size, step.batches, step.device, step.precision) == (BATCH, 1, "cpu", "32-true")
    assert step.threads == torch.get_num_threads()
    products = {row.module: (row.dims, row.part) for row in step.rows if row.name == "aten.addmm"}
    assert products == {"net.0": ((BATCH, 16, 8), "forward"), "net.2": ((BATCH, 2, 16), "forward")}
    assert {row.part for row in step.rows if row.name == "aten.mm"} == {"backward"}
    assert "optimizer" in {row.part for row in step.rows}
    assert all(row.calls > 0 and row.bytes > 0 and row.seconds > 0 for row in step.rows)
    assert facts["operations"] == sum(row.calls for row in step.rows)
    assert 0 <= facts["memory_bytes"] <= facts["bytes"]


def test_accumulated_gradients_are_several_batches_of_a_step_and_an_unrecorded_one_has_no_record() -> None:
    step = fit(Net(), accumulate_grad_batches=2).operations
    assert step is not None and step.batches == pytest.approx(2, abs=0.01)
    assert fit(Net(), steps=1).operations is None


def test_a_record_has_a_row_for_calls_of_the_same_dimensions_and_of_the_device_what_it_can_do() -> None:
    relu = OperationRow("aten.relu", "m", "forward", "fp32", (4, 8), 1, 0, 100, 50, 1e-6)
    other = OperationRow("aten.relu", "m", "forward", "fp32", (4, 16), 1, 0, 200, 50, 1e-6)
    known = Calibration("cpu", "A CPU", "avx2", "2.9", 2, {"fp32": 1e11}, launch_us=1.5, host="somewhere")
    summary = {"batch_size": 4, "batches_per_sec": 100.0, "step_ms_median": 10.0, "device": "cpu"}
    step = step_operations([relu, relu, other], summary | {"device_name": "A CPU", "precision": "32-true"}, known)
    assert step is not None
    assert [(row.dims, row.calls, row.bytes) for row in step.rows] == [((4, 8), 2, 200), ((4, 16), 1, 200)]
    assert step.calibration == {"threads": 2, "matmul_flops_per_sec": {"fp32": 1e11}, "launch_us": 1.5}
