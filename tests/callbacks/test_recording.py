"""The operations of three steps are recorded in the run itself: which steps, their FLOPs, their times, and when not."""

from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks import ThroughputMonitor
from batchscope.hardware import operations

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


def fit(
    module: LightningModule, *callbacks: Callback, steps: int = STEPS, ckpt_path: Any = None, **options: Any
) -> ThroughputMonitor:
    monitor = ThroughputMonitor(calibrate=False, verbose=False)
    data = DataLoader(TensorDataset(torch.ones(BATCH * 40, 8)), batch_size=BATCH)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    lightning.Trainer(accelerator="cpu", max_steps=steps, callbacks=[monitor, *callbacks], **quiet, **options).fit(
        module, data, ckpt_path=ckpt_path
    )
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


def test_three_updates_are_recorded_after_the_first(recorded_in):
    fit(Net())
    assert recorded_in.count("addmm") == 3 * 2


def test_every_batch_of_an_update_is_recorded(recorded_in):
    fit(Net(), accumulate_grad_batches=3)
    assert recorded_in.count("addmm") == 3 * 3 * 2


def test_recorded_steps_are_in_no_rate():
    assert fit(Net(), steps=12).summary["updates"] == 12 - 5  # the warm-up holds them


def test_a_run_of_recorded_steps_alone_has_no_rate():
    assert "samples_per_sec" not in fit(Net(), steps=4).summary


def test_the_summary_has_the_operations_of_a_step():
    step = fit(Net()).summary["step"]
    assert step["operations"] >= 2 + 1 + 1 + 3  # forward, loss, activation, backward
    assert 0 <= step["memory_bytes"] <= step["bytes"]
    assert step["bytes"] > 0


def test_operations_are_of_the_part_in_which_they_ran(monkeypatch):
    found = {}

    class Keep(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor = next(each for each in trainer.callbacks if isinstance(each, ThroughputMonitor))
            found.update({each.name: each.part for each in monitor.recorded.operations()})

    fit(Net(), Keep())
    assert (found["aten.addmm"], found["aten.mm"]) == ("forward", "backward")
    assert "optimizer" in found.values()


@pytest.fixture
def compiler() -> Iterator[None]:
    """Afterwards this process has compiled nothing."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def fit_compiled(module: LightningModule, **options: Any) -> ThroughputMonitor:
    module.net.compile(backend="eager")
    return fit(module, **options)


def test_a_compiled_module_takes_three_eager_updates_for_its_flops_and_has_no_operations(compiler):
    plain, compiled = fit(Net()).summary, fit_compiled(Net()).summary
    assert compiled["flops_per_sample"] == plain["flops_per_sample"] > 0
    assert compiled["step"] == {"not_recorded": "the step is compiled"}


def test_a_compiled_training_that_is_resumed_later_is_not_recorded(compiler, tmp_path):
    class Save(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    fit(Net(), Save(), steps=6)
    found = fit_compiled(Net(), steps=12, ckpt_path=tmp_path / "last.ckpt").summary
    assert found["missing"]["mfu"].startswith("the training was resumed after update 4")


def test_a_step_that_fails_while_it_is_recorded_leaves_no_recorder_behind(recorded_in):
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise ValueError("the user's own")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="the user's own"):
        fit(Failing())
    seen = len(recorded_in)
    torch.ones(2).add(1)
    assert len(recorded_in) == seen


def test_a_recorder_that_a_callback_begins_within_a_step_ends_properly(recorded_in):
    class Counting(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            self.counter = operations.OperationRecorder()
            self.counter.__enter__()

        def on_train_batch_end(self, *args: Any) -> None:
            self.counter.__exit__(None, None, None)

    fit(Net(), Counting())
    seen = len(recorded_in)
    torch.ones(2).add(1)
    assert len(recorded_in) == seen


def test_recording_changes_no_bit_of_the_training():
    def weights(record: bool) -> torch.Tensor:
        lightning.seed_everything(0, verbose=False)
        module = Net()
        monitor = ThroughputMonitor(calibrate=False, verbose=False, record_operations=record)
        data = DataLoader(TensorDataset(torch.randn(BATCH * 10, 8)), batch_size=BATCH, shuffle=True)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        lightning.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[monitor], enable_checkpointing=False, **quiet
        ).fit(module, data)
        return torch.cat([each.flatten() for each in module.parameters()])

    assert torch.equal(weights(True), weights(False))


class Growing(Net):
    """A module whose steps do 30 products of 512×512 from some batch on, and nearly nothing before."""

    grows_at = 6

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx >= self.grows_at:
            x = torch.ones(512, 512)
            for _ in range(30):
                x @ x
        return super().training_step(batch, batch_idx)


def test_steps_are_recorded_once(recorded_in):
    fit(Growing(), steps=40)
    assert recorded_in.count("addmm") == 3 * 2


@pytest.mark.parametrize("grows_at", [6, 14])
def test_steps_that_change_later_make_the_verdict_unclear_and_leave_no_flops(grows_at):
    late = Growing()
    late.grows_at = grows_at
    found = fit(late, steps=40).summary
    assert found["bottleneck"]["kind"] == "unclear"
    assert "because the steps changed: the median step takes" in found["bottleneck"]["evidence"]
    assert "flops_per_sample" not in found
    assert found["missing"]["mfu"] == "the steps have changed since their FLOPs were recorded"


def test_the_flops_of_a_sample_are_those_of_the_recorded_updates():
    found = fit(Net()).summary
    assert found["flops_per_sample"] == 3 * (2 * 8 * 16 + 2 * 16 * 2) - 2 * 8 * 16


def test_accumulated_gradients_count_each_batch():
    assert fit(Net(), accumulate_grad_batches=3).summary["flops_per_sample"] == fit(Net()).summary["flops_per_sample"]


class Lengths(Net):
    """Takes longer sequences from batch to batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0].repeat(1 + batch_idx, 1)).square().mean()


def test_updates_of_different_flops_leave_none():
    with pytest.warns(UserWarning, match="The FLOPs of Lengths cannot be counted"):
        found = fit(Lengths()).summary
    assert found["missing"]["mfu"] == "the recorded updates take different numbers of FLOPs a sample"


class Fourier(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.fft.rfft(self.net(batch[0])).abs().mean()


def test_an_operation_without_a_formula_leaves_no_flops_and_is_named():
    with pytest.warns(UserWarning, match="the FLOPs of aten._fft_r2c.default are not known"):
        found = fit(Fourier()).summary
    assert not {"flops_per_sample", "flops_per_sec", "mfu"} & found.keys()
    assert found["step"]["operations"] > 0


def test_a_recorder_that_fails_costs_one_warning_and_the_fit_goes_on(monkeypatch):
    def broken(self: Any) -> list[Any]:
        raise ZeroDivisionError("the recorder's own")

    monkeypatch.setattr(operations.OperationRecorder, "next_step", broken)
    with pytest.warns(UserWarning, match="ThroughputMonitor stopped measuring: ZeroDivisionError") as caught:
        monitor = fit(Net())
    assert len([one for one in caught if "stopped measuring" in str(one.message)]) == 1
    assert "the recorder's own" in monitor.summary["missing"]["bottleneck"]


def test_an_operation_that_cannot_be_noted_ends_the_recording_alone(monkeypatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("the recorder's own")

    monkeypatch.setattr(operations.OperationRecorder, "_note", broken)
    found = fit(Net()).summary
    assert found["updates"] == STEPS - 5
    assert "ZeroDivisionError" in found["missing"]["flops_per_sec"]


def test_a_fit_that_is_resumed_at_update_3_goes_on_bit_for_bit_and_has_its_flops(tmp_path):
    def train(steps: int, ckpt: Any = None, record: bool = True) -> tuple[torch.Tensor, ThroughputMonitor]:
        lightning.seed_everything(0, verbose=False)
        module, monitor = Net(), ThroughputMonitor(calibrate=False, verbose=False, record_operations=record)
        data = DataLoader(TensorDataset(torch.ones(BATCH * 40, 8)), batch_size=BATCH)  # alike from any batch on
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=steps, callbacks=[monitor], enable_checkpointing=False, **quiet
        )
        trainer.fit(module, data, ckpt_path=ckpt)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return torch.cat([each.flatten() for each in module.parameters()]), monitor

    whole, monitor = train(12)
    plain, _ = train(12, record=False)
    train(3)
    resumed, other = train(12, ckpt=tmp_path / "last.ckpt")
    assert torch.equal(whole, plain) and torch.equal(whole, resumed)
    assert other.summary["flops_per_sample"] == monitor.summary["flops_per_sample"] > 0


def test_a_compiled_training_runs_the_same_updates_uncompiled_after_a_stop(compiler, recorded_in, tmp_path):
    class TwoOptimizers(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.net(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[n].parameters(), lr=0.1) for n in (0, 2)]

    class Save(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    fit_compiled(TwoOptimizers(), steps=12)
    whole = len(recorded_in)
    recorded_in.clear()
    fit(TwoOptimizers(), Save(), steps=2)  # one batch
    recorded_in.clear()
    fit_compiled(TwoOptimizers(), steps=12, ckpt_path=tmp_path / "last.ckpt")
    assert len(recorded_in) == whole > 0
