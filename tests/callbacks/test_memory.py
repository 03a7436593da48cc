"""MemoryMonitor counts once, in anybody's project, and touches nothing."""

import functools
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks.memory import MemoryMonitor, StateOutsideError
from batchscope.hardware import memory_limits
from tests.support.third_party_modules import Stranger, loader


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which what is printed is one line."""
    monkeypatch.setenv("COLUMNS", "1000")


def fit(
    module: lightning.LightningModule,
    tmp_path: Path,
    count: bool = True,
    verbose: bool = True,
    data: Any = "loader",
    **options: Any,
) -> MemoryMonitor:
    monitor = MemoryMonitor(count, verbose)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path, **quiet, **options}
    trainer = lightning.Trainer(callbacks=[monitor], **options)
    trainer.fit(module, loader() if data == "loader" else data)
    return monitor


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, as one line."""
    return " ".join(capsys.readouterr().out.split())


def test_the_record_has_the_peak_its_parts_and_what_the_process_has_grown_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = fit(Stranger(), tmp_path)
    facts = monitor.record_facts()["memory"]
    assert facts["batch_size"] == 4
    assert facts["parts_bytes"]["parameters"] == facts["parts_bytes"]["gradients"] == 5 * 4
    assert facts["parts_bytes"]["optimizer"] == 0
    assert facts["peak_bytes"] == sum(facts["parts_bytes"].values())
    assert facts["measured_bytes"]["process_peak"] > facts["measured_bytes"]["process_growth"] >= 0
    assert "uncounted" not in facts
    line = printed(capsys)
    assert line.startswith("memory at the peak of a step 0.1")
    assert line.endswith("(counted)")
    assert all(f" {part} " in line for part in facts["parts_bytes"])


class ByValue(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > -1 else -loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def test_a_step_that_cannot_be_counted_has_the_parts_that_exist_and_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = fit(ByValue(), tmp_path)
    assert monitor.facts["parts_bytes"] == {"parameters": 20, "gradients": 20, "optimizer": 20}
    assert "_local_scalar_dense" in monitor.facts["uncounted"]
    line = printed(capsys)
    assert line.startswith("memory 0.0586 KiB: parameters 0.0195, optimizer 0.0195, gradients 0.0195; the rest of")
    assert "the rest of the step is not counted: " in line and "_local_scalar_dense" in line


class ByClosure(Stranger):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_the_step_of_an_optimizer_that_needs_a_closure_is_measured_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = fit(ByClosure(), tmp_path)
    assert monitor.facts["parts_bytes"]["optimizer"] > 0
    line = printed(capsys)
    assert line.startswith("memory at the peak of a step ") and "; not counted: the step of LBFGS (TypeError: " in line


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


def test_a_packed_sequence_is_counted_or_a_line_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Packed(), tmp_path, data=None)
    line = printed(capsys)
    assert line.startswith("memory ") and "not counted: " in line


def test_what_is_printed_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    fit(Stranger(), tmp_path)
    first, *rest = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("memory ") and rest
    assert all(line.startswith(" " * 8) and len(line) <= 60 for line in rest)


def test_without_a_count_the_parts_that_exist_are_printed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Stranger(), tmp_path, count=False)
    line = printed(capsys)
    assert line.endswith("; the rest of the step is not counted: MemoryMonitor(count=False)")
    fit(Stranger(), tmp_path, verbose=False)
    assert "memory" not in capsys.readouterr().out


def test_a_training_goes_on_bit_for_bit_as_without_the_monitor(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [MemoryMonitor(count=True)]):
        lightning.seed_everything(1, verbose=False)
        module = Stranger()
        module.layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=callbacks
        )
        trainer.fit(module, loader())
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


class TooLarge(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


def test_out_of_memory_says_what_there_was_and_what_would_have_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchscope.callbacks.memory.free_bytes", lambda device: 100)
    monitor = MemoryMonitor(count=True)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[monitor]
    )
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(TooLarge(), loader())
    known = monitor.facts["out_of_memory"]
    assert known["available_bytes"] == 120  # and the parameters, which were there
    assert known["needed_bytes"] == monitor.facts["peak_bytes"] > 120
    assert known["batch_size_that_fits"] == 2


class Late(ByValue):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.current_epoch == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Stranger.training_step(self, batch, batch_idx)


def test_the_optimizer_states_of_a_resumed_fit_are_memory_that_its_steps_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchscope.callbacks.memory.free_bytes", lambda device: 100)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "default_root_dir": tmp_path}
    first = lightning.Trainer(max_epochs=1, enable_checkpointing=False, **options)
    first.fit(Late(), loader())
    first.save_checkpoint(tmp_path / "last.ckpt")
    monitor = MemoryMonitor(count=True)
    resumed = lightning.Trainer(max_epochs=2, enable_checkpointing=False, callbacks=[monitor], **options)
    with pytest.raises(torch.OutOfMemoryError):
        resumed.fit(Late(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert monitor.facts["out_of_memory"]["available_bytes"] == 100 + 20 + 20  # free, parameters, momentum


def test_an_error_of_another_kind_is_no_out_of_memory() -> None:
    assert memory_limits.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert memory_limits.is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert memory_limits.is_out_of_memory(MemoryError())
    assert not memory_limits.is_out_of_memory(ValueError("out of memory"))
    assert not memory_limits.is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_free_memory_of_a_gpu_is_what_the_device_and_the_allocator_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 400)
    assert memory_limits.free_bytes(torch.device("cuda")) == 1200
    assert memory_limits.measured_bytes(torch.device("cuda")) == {"allocated": 200, "reserved": 400}


class Caching(LightningModule):
    """Keeps a mask in a cached function, where a counted step leaves one without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @staticmethod
    @functools.lru_cache
    def mask(size: int, device: torch.device) -> torch.Tensor:
        return torch.triu(torch.ones(size, size, device=device))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.layer(batch[0]) @ self.mask(8, batch[0].device)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("count", [False, True])
def test_a_step_that_keeps_tensors_outside_of_its_module_is_trained_truly_or_not_at_all(count: bool) -> None:
    Caching.mask.cache_clear()
    module, data = Caching(), DataLoader(TensorDataset(torch.ones(12, 8)), batch_size=4)
    before = module.layer.weight.detach().clone()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[MemoryMonitor(count=count)], **quiet)
    if count:
        with pytest.raises(StateOutsideError, match="Caching keeps tensors outside of the module"):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)
        assert not torch.equal(module.layer.weight, before)
    Caching.mask.cache_clear()
