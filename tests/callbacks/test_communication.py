"""What the exchange of gradients adds to a step, separated from arithmetic, in real processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import lightning
import pytest
import torch
from torch import Tensor, nn

from batchscope.callbacks.throughput import ThroughputMonitor

SLOWER_MS = 40
BATCHES = 50


class Uneven(lightning.LightningModule):
    """Two layers of 1,056 parameters in all, whose second process computes for some time longer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 31), nn.Linear(31, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(1e-3 * SLOWER_MS * self.global_rank)
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(**options: object) -> tuple[lightning.Trainer, ThroughputMonitor, Uneven]:
    monitor, module = ThroughputMonitor(calibrate=False, verbose=False), Uneven()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[monitor], **quiet, **options)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(200, 32), batch_size=4))
    return trainer, monitor, module


def test_one_process_has_nobody_to_wait_for() -> None:
    _, monitor, _ = fit(limit_train_batches=8, enable_model_summary=False)
    assert monitor.summary["step_ms"] > 0 and "communication_ms" not in monitor.summary


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 5])
def test_the_faster_process_waits_for_the_slower_which_waits_for_nobody(tmp_path: Path, batches: int) -> None:
    line = [sys.executable, __file__, str(tmp_path), str(batches)]
    subprocess.run(line, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1200)
    faster, slower = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert faster["gradient_bytes"] == slower["gradient_bytes"] == 4 * (32 * 31 + 31 + 31 + 1)
    assert faster["communication_ms"] > 0.8 * SLOWER_MS
    assert slower["communication_ms"] < 0.5 * SLOWER_MS
    assert faster["slowest_process"] == 1  # the one that the other waits for
    assert faster["slowest_step_ms"] > faster["fastest_step_ms"] + 0.5 * SLOWER_MS
    assert faster["hooks"] == slower["hooks"] == 0


if __name__ == "__main__":  # one of two processes; Lightning starts the other
    folder, batches = Path(sys.argv[1]), int(sys.argv[2])
    steps = {"limit_train_batches": BATCHES, "accumulate_grad_batches": batches}
    trainer, monitor, module = fit(strategy="ddp", devices=2, use_distributed_sampler=False, **steps)
    hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in module.parameters())
    (folder / str(trainer.global_rank)).write_text(json.dumps(monitor.summary | {"hooks": hooks}))
