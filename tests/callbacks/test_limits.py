"""The bottleneck is the one that was built into a run, on this machine, against its own calibration."""

from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

from batchscope.callbacks import _analysis
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.measure import calibrate
from tests.support.third_party_modules import Stranger, loader, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return calibrate(torch.device("cpu"))


def limit(module: lightning.LightningModule, data: Any) -> dict[str, Any]:
    """Train for an epoch, and say what limited it."""
    monitor = ThroughputMonitor(verbose=False)
    train(module, monitor, data=data, max_epochs=1)
    return monitor.summary["bottleneck"]


@pytest.fixture(autouse=True)
def known(measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: measured)


def test_a_tiny_model_at_a_tiny_batch_is_limited_by_the_host() -> None:
    found = limit(Stranger(), loader(400))
    assert found["kind"] == "host"
    assert "DataLoader(batch_size=" in found["advice"]


def test_large_products_are_limited_by_compute() -> None:
    class Large(Stranger):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layers(batch).square().mean()

    found = limit(Large(), torch.randn(12, 4096, 1024))
    assert found["kind"] == "compute"
