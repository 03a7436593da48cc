"""The bottleneck is the one that was built into a run, on this machine, against its own calibration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.measure import calibrate
from tests.support.third_party_modules import Stranger, loader, train


class Large(Stranger):
    """Has large products, and a step that is nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_tiny_model_is_limited_by_the_host_and_large_products_by_compute(measured: list[Any]) -> None:
    measured[0] = calibrate(torch.device("cpu"))
    train(Stranger(), monitor := ThroughputMonitor(verbose=False), data=loader(400), max_epochs=1)
    assert monitor.summary["bottleneck"]["kind"] == "host"
    assert "DataLoader(batch_size=" in monitor.summary["bottleneck"]["advice"]
    train(Large(), monitor, data=torch.randn(12, 4096, 1024), max_epochs=1)
    assert monitor.summary["bottleneck"]["kind"] == "compute"
