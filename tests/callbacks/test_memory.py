"""The memory that a step holds, by its parts, in any Lightning project."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from batchscope.callbacks import _recording
from batchscope.callbacks._recording import RecordedUpdates
from tests.callbacks.support import monitoring, stranger
from tests.support.third_party_modules import Stranger, loader, train


def fit(module, is_recorded: bool = True, **options) -> dict[str, Any]:
    """Train, and return the entry `memory` of the run's record."""
    train(module, monitor := monitoring(record_operations=is_recorded), **{"max_epochs": 1, **options})
    return monitor.record_facts().get("memory", {})


class Wide(Stranger):
    """Two layers, with an activation of 64 numbers a sample between them, and Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Manual(Wide):
    automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def compiled() -> Wide:
    module = Wide()
    module.layer._compiled_call_impl = module.layer._call_impl  # as module.compile() sets it, without a compiler
    return module


WEIGHTS = 4 * (4 * 64 + 64 + 64 + 1)  # bytes
SAVED = 4 * 4 * (64 + 1)  # of four samples: the output of the ReLU, and the input of the loss
PARTS = {"parameters": WEIGHTS, "gradients": WEIGHTS, "optimizer": 2 * WEIGHTS + 4 * 4, "saved": SAVED}


@pytest.mark.parametrize("module", [Wide, Manual])
def test_the_record_has_the_parts_of_a_step(module: type[Wide]) -> None:
    memory = fit(module())
    assert memory["parts_bytes"] == PARTS
    assert "measured_bytes" not in memory and "uncounted" not in memory


def test_on_a_gpu_the_rest_is_what_its_peak_has_beyond_the_parts(monkeypatch) -> None:
    peaks = [None, sum(PARTS.values()) + 100]
    monkeypatch.setattr(RecordedUpdates, "_peak", lambda memory: peaks.pop(0))
    memory = fit(Wide())
    assert (memory["parts_bytes"], memory["measured_bytes"]) == (PARTS | {"rest": 100}, sum(PARTS.values()) + 100)


def test_a_peak_from_before_the_training_is_none_of_the_training(monkeypatch) -> None:
    monkeypatch.setattr(RecordedUpdates, "_peak", lambda memory: 2**30)
    assert fit(Wide()) == {"parts_bytes": PARTS}


def test_the_updates_2_to_4_are_seen_and_no_other() -> None:
    def look(module) -> None:
        is_watched.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)

    is_watched = []
    fit(stranger(training_step=look), accumulate_grad_batches=2, data=loader(40))
    assert is_watched == [False] * 2 + [True] * 6 + [False] * 2


@pytest.mark.parametrize(
    ("module", "steps", "reason"),
    [
        (Wide(), 1, "recording begins with update 2"),
        (compiled(), 5, "a compiled step keeps other tensors than a recorded one would"),
    ],
)
def test_a_fit_whose_saved_tensors_cannot_be_seen_says_why(module: Wide, steps: int, reason: str) -> None:
    memory = fit(module, max_steps=steps)
    assert memory["uncounted"] == reason
    assert (memory["parts_bytes"]["parameters"], "saved" in memory["parts_bytes"]) == (WEIGHTS, False)


def test_where_the_parameters_are_sharded_there_are_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recording, "SingleDeviceStrategy", DDPStrategy)  # the strategy of the fit is another class
    assert fit(Wide()) == {"uncounted": "the parameters are sharded"}


def test_the_steps_of_a_strategy_that_is_like_lightnings_are_recorded() -> None:
    class Theirs(SingleDeviceStrategy): ...

    assert fit(Wide(), strategy=Theirs("cpu")) == {"parts_bytes": PARTS}


def test_without_recorded_operations_there_is_nothing() -> None:
    assert fit(Wide(), is_recorded=False) == {}
