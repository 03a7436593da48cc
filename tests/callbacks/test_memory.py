"""MemoryMonitor says what a step holds, in anybody's project, and touches nothing."""

from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from batchscope.callbacks import memory
from batchscope.callbacks.memory import MemoryMonitor
from tests.support.third_party_modules import Stranger, loader, train


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which what is printed is one line."""
    monkeypatch.setenv("COLUMNS", "1000")


def fit(module: lightning.LightningModule, monitor: MemoryMonitor | None = None, **options: Any) -> MemoryMonitor:
    monitor = monitor or MemoryMonitor()
    train(module, monitor, **{"max_epochs": 1, **options})
    return monitor


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, as one line."""
    return " ".join(capsys.readouterr().out.split())


class Wide(Stranger):
    """Two layers, with an activation of 64 numbers a sample between them, and Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


WEIGHTS = 4 * (4 * 64 + 64 + 64 + 1)  # bytes
SAVED = 4 * 4 * (64 + 1)  # of four samples: what the ReLU returns, and what the loss is computed from


def test_the_record_has_the_parts_of_a_step_and_the_peak_of_the_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = fit(Wide()).record_facts()["memory"]
    assert facts["batch_size"] == 4
    assert facts["parts_bytes"] == {
        "parameters": WEIGHTS, "gradients": WEIGHTS, "optimizer": 2 * WEIGHTS + 4 * 4, "saved": SAVED,
    }  # fmt: skip
    assert facts["measured_bytes"]["process_peak"] > 0
    assert "uncounted" not in facts
    line = printed(capsys)
    assert line.startswith("memory a step holds 7.0")
    assert all(f" {part} " in line for part in ("parameters", "gradients", "optimizer", "saved by autograd"))


def test_on_a_gpu_the_rest_is_what_the_peak_has_beyond_the_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = 4 * WEIGHTS + 16 + SAVED
    told = {"allocated": parts + 100, "reserved": 2**20}
    monkeypatch.setattr(memory, "measured_bytes", lambda device: dict(told))
    facts = fit(Wide()).facts
    assert facts["parts_bytes"]["rest"] == 100
    assert facts["measured_bytes"]["allocated"] == sum(facts["parts_bytes"].values()) == parts + 100
    assert "; measured 7.1" in printed(capsys)


def test_the_updates_2_to_4_are_seen_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seeing(Wide):
        seen: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
            return super().training_step(batch, batch_idx)

    fit(Seeing(), accumulate_grad_batches=2, data=loader(40))
    assert Seeing.seen == [False] * 2 + [True] * 6 + [False] * 2


def test_a_step_by_hand_has_the_same_parts() -> None:
    class Manual(Wide):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    assert fit(Manual()).facts["parts_bytes"] == fit(Wide()).facts["parts_bytes"]


def test_sparse_gradients_and_steps_by_value_are_measured_too() -> None:
    class Sparse(Stranger):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(10, 4, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = super().training_step((x + self.table((x > x.mean()).long()), y), batch_idx)
            return loss if loss.item() >= 0 else -loss

    facts = fit(Sparse()).facts
    assert facts["parts_bytes"]["saved"] > 0
    assert facts["parts_bytes"]["parameters"] == 4 * (4 + 1 + 40)


def test_an_optimizer_that_calls_the_step_again_is_measured() -> None:
    class ByClosure(Wide):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    parts = fit(ByClosure()).facts["parts_bytes"]
    assert parts["optimizer"] > 0 and parts["saved"] == SAVED


class Packed(Stranger):
    """Trains on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LSTM(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch)[0].data.sum()

    def train_dataloader(self) -> DataLoader:
        sequences = [torch.ones(length, 4) for length in (3, 2, 2, 1)]
        return DataLoader(sequences, batch_size=2, collate_fn=nn.utils.rnn.pack_sequence)


def test_a_packed_sequence_is_measured() -> None:
    assert fit(Packed(), data=Packed().train_dataloader()).facts["parts_bytes"]["saved"] > 0


def test_a_fit_whose_saved_tensors_cannot_be_seen_says_why() -> None:
    facts = fit(Stranger(), max_steps=1).facts
    assert facts["uncounted"] == "recording begins with update 2"
    assert facts["parts_bytes"]["parameters"] == 20
    module = Wide()
    module.layer._compiled_call_impl = module.layer._call_impl  # what module.compile() sets, without a compiler
    assert fit(module).facts["uncounted"] == "a compiled step keeps other tensors than a recorded one would"


def test_a_measurement_that_fails_is_one_warning_and_the_fit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("its own")

    monkeypatch.setattr(memory.SavedTensors, "watch", broken)
    with pytest.warns(UserWarning, match="MemoryMonitor stopped measuring: ZeroDivisionError") as caught:
        monitor = fit(Stranger())
    assert len([one for one in caught if "stopped measuring" in str(one.message)]) == 1
    assert monitor.facts["uncounted"] == "the measurement ended with ZeroDivisionError: its own"


def test_an_error_of_the_step_is_the_steps_own_and_what_was_measured_stays() -> None:
    class Failing(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    monitor = MemoryMonitor()
    with pytest.raises(torch.OutOfMemoryError):
        fit(Failing(), monitor=monitor)
    assert monitor.facts["parts_bytes"]["saved"] == SAVED
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_training_goes_on_bit_for_bit_as_without_the_monitor() -> None:
    weights = []
    for callbacks in ([], [MemoryMonitor()]):
        lightning.seed_everything(1, verbose=False)
        module = Stranger()
        module.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))
        train(module, *callbacks)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)
