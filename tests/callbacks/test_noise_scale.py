"""NoiseScaleMonitor: the noise scale of gradients whose noise is known, and a training that it leaves as it is."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from batchscope.callbacks.noise_scale import Estimate, NoiseScaleMonitor, noise_scale
from tests.support.runs import Forked  # which has conftest.py start the server
from tests.support.waiting import PATIENCE_S


def estimates_of(gradient: float, noise: float, n: int, b: int, count: int, dims: int = 50) -> list[Estimate]:
    """From drawn gradients: |G|² = `gradient`, tr Σ = `noise`."""
    rng = np.random.default_rng(0)
    mean = np.full(dims, math.sqrt(gradient / dims))
    draws = mean + rng.normal(0, math.sqrt(noise / dims / b), (count, n, dims))
    small = (draws**2).sum(-1).mean(-1)
    large = (draws.mean(1) ** 2).sum(-1)
    return [Estimate.of(*values, n, b) for values in zip(small.tolist(), large.tolist(), strict=True)]


@pytest.mark.parametrize(("n", "b"), [(2, 8), (4, 16), (8, 2)])
def test_the_estimates_have_no_bias(n: int, b: int) -> None:
    found = np.mean(estimates_of(gradient=1.0, noise=40.0, n=n, b=b, count=4000), axis=0)
    assert found == pytest.approx([40.0, 1.0], rel=0.1)


def test_the_noise_scale_is_a_ratio_of_sums_within_its_interval() -> None:
    found = noise_scale(estimates_of(gradient=1.0, noise=40.0, n=2, b=8, count=500))
    assert found is not None
    assert found.low < found.value < found.high
    assert found.low < 40 < found.high


def test_the_interval_has_no_upper_end_where_the_gradient_may_be_zero() -> None:
    found = noise_scale(estimates_of(gradient=0.01, noise=40.0, n=2, b=8, count=30))
    assert found is None or math.isinf(found.high)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    drawn = estimates_of(gradient=1.0, noise=40.0, n=2, b=8, count=100 * 200)
    found = [noise_scale(drawn[at : at + 100]) for at in range(0, len(drawn), 100)]
    held = [one is not None and one.low <= 40 <= one.high for one in found]
    assert np.mean(held) > 0.85


@pytest.mark.parametrize(
    "found", [[], [Estimate(1.0, 1.0)] * 5, [Estimate(-1.0, 1.0)] * 50, [Estimate(1.0, -1.0)] * 50]
)
def test_what_is_not_known_is_absent(found: list[Estimate]) -> None:
    """Too few, a negative noise, a negative gradient."""
    assert noise_scale(found) is None


class Mean(LightningModule):
    """Learns the mean of samples; the gradient of one is `w - x`: |G|² = 20, and tr Σ = 20 · 4 is the samples' variance."""

    def __init__(self, step: Callable[["Mean", Tensor], Tensor | None] | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(20))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.step = step

    def training_step(self, batch: Any) -> Tensor | None:
        loss = (self.w - batch[0]).square().sum(1).mean() / 2
        return loss if self.step is None else self.step(self, loss)

    def test_step(self, batch: Any) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.w.grad is not None:
            self.w.grad.nan_to_num_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    module: LightningModule,
    monitor: NoiseScaleMonitor | None,
    samples: int = 2000,
    ckpt: Path | None = None,
    **options: Any,
) -> lightning.Trainer:
    quiet: dict[str, Any] = {
        name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    }
    callbacks = [] if monitor is None else [monitor]
    trainer = lightning.Trainer(accelerator="cpu", callbacks=callbacks, **{"max_epochs": 1, **quiet, **options})
    generator = torch.Generator().manual_seed(trainer.global_rank)
    x, y = torch.randn(samples, 20, generator=generator) * 2, torch.randint(3, (samples,), generator=generator)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8), ckpt_path=ckpt, weights_only=True)
    return trainer


def assert_known(monitor: NoiseScaleMonitor) -> None:
    found = monitor.recent()
    assert found is not None
    assert found.low < 4 < found.high
    assert found.value == pytest.approx(4, rel=0.5)


@pytest.mark.parametrize(
    ("halves", "options"),
    [
        (True, {"plugins": [MixedPrecision("16-mixed", "cpu")], "samples": 4000}),
        (False, {"plugins": [MixedPrecision("16-mixed", "cpu")], "accumulate_grad_batches": 4, "samples": 4000}),
        (False, {"gradient_clip_val": 0.1}),
        (False, {"precision": "bf16-true"}),
    ],
)
def test_a_training_with_known_noise_gives_its_noise_scale(halves: bool, options: dict[str, Any]) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2, halves=halves)
    fit(Mean(), monitor, **options)
    assert_known(monitor)


class Net(LightningModule):
    """Has all that computing a gradient once more could change: random numbers, buffers, a metric, logs, attributes."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        if compiled:
            self.net.compile(backend="aot_eager")
        self.accuracy = MulticlassAccuracy(3)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        output = self.net(x + torch.randn_like(x) + np.random.rand())
        self.accuracy(output, y)
        self.seen.append(len(x))
        self.log("loss", loss := F.cross_entropy(output, y), on_step=False, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trained(monitor: NoiseScaleMonitor | None, compiled: bool = False, **options: Any) -> list[Any]:
    """All that a training leaves, in bits."""
    lightning.seed_everything(0)
    module = Net(compiled)
    trainer = fit(module, monitor, samples=500, **options)
    state = [one.tolist() for one in module.state_dict().values()]
    left = [torch.rand(3).tolist(), np.random.rand()]
    return [state, left, module.seen, float(module.accuracy.compute()), float(trainer.callback_metrics["loss"])]


@pytest.mark.parametrize(
    ("halves", "options"),
    [
        (False, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        (False, {"plugins": [MixedPrecision("16-mixed", "cpu")], "gradient_clip_val": 0.1}),
        (True, {"precision": "bf16-mixed"}),
        pytest.param(True, {"compiled": True}, marks=pytest.mark.slow),
    ],
)
def test_the_training_is_bit_for_bit_the_same(halves: bool, options: dict[str, Any]) -> None:
    process = Forked.start(train_with_and_without, halves, options)  # a process that has compiled records no operations
    assert process.end(PATIENCE_S) == 0


def train_with_and_without(halves: bool, options: dict[str, Any]) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2, halves=halves)
    assert trained(monitor, **options) == trained(None, **options)
    assert monitor.failure is None
    assert len(monitor.estimates) > 5


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 3])
def test_two_ranks_know_the_noise_scale_and_train_as_without_it(batches: int, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.callbacks.test_noise_scale", str(tmp_path), str(batches)]
    subprocess.run(line, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1200)
    for rank in (0, 1):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found["with"] == found["without"]
        assert found["samples"] == pytest.approx(4, rel=0.5)
        assert found["hooks"] == 0


def test_what_is_known_is_in_the_record_and_the_last_lines() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    fit(Mean(), monitor)
    facts = monitor.record_facts()["noise_scale"]
    assert facts["low"] < facts["samples"] < facts["high"]
    assert monitor.summary_lines()[0].startswith("noise   noise scale")


def no_gradient_in_between(module: Mean, loss: Tensor) -> Tensor | None:
    return None if module.global_step % 3 == 2 else loss


def not_a_number_once(module: Mean, loss: Tensor) -> Tensor:
    return loss * (math.nan if module.global_step == 100 else 1)


@pytest.mark.parametrize("step", [no_gradient_in_between, not_a_number_once])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4, "samples": 4000}])
def test_an_update_without_a_gradient_is_left_out(step: Any, options: dict[str, Any]) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    fit(Mean(step), monitor, **options)
    assert_known(monitor)


class ByHand(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        self.manual_backward(super().training_step(batch))


class Sparse(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 20, sparse=True)

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) + self.table(torch.tensor([1])).sum()


@pytest.mark.filterwarnings("ignore:NoiseScaleMonitor stopped measuring")
@pytest.mark.parametrize(
    ("module", "options", "why"),
    [
        (Mean(), {"samples": 40}, "fewer than 10"),
        (Mean(), {"samples": 24, "accumulate_grad_batches": 2}, "fewer than 10"),
        (ByHand(), {}, "by hand"),
        (Sparse(), {}, "sparse"),
        (Sparse(), {"accumulate_grad_batches": 2}, "sparse"),
        (Mean(lambda module, loss: (module.w * 0).sum()), {}, "not positive"),
    ],
)
def test_what_cannot_be_known_is_said(module: LightningModule, options: dict[str, Any], why: str) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    trainer = fit(module, monitor, **{"samples": 800, **options})
    assert trainer.state.finished
    assert monitor.summary_lines() == []
    assert why in monitor.record_facts()["noise_scale"]["missing"]


def test_a_batch_that_cannot_be_halved_ends_the_estimate_and_not_the_training() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2, halves=True)
    rows = TensorDataset(torch.randn(80, 20))
    loader = DataLoader(rows, 8, collate_fn=lambda batch: [torch.stack([x for (x,) in batch]), torch.ones(3)])
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[monitor], logger=False, enable_checkpointing=False
    )
    with pytest.warns(UserWarning, match="cannot be halved"):
        trainer.fit(Mean(), loader)
    assert trainer.state.finished


if __name__ == "__main__":  # one of two ranks; Lightning starts the other
    folder, batches = Path(sys.argv[1]), int(sys.argv[2])
    ranks: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    ranks["accumulate_grad_batches"] = batches
    one, other = NoiseScaleMonitor(every_n_steps=2), NoiseScaleMonitor(every_n_steps=2)
    rank = fit(module := Mean(), one, **ranks).global_rank
    results = {"with": trained(other, **ranks), "without": trained(None, **ranks)}
    results["hooks"] = sum(len(each._backward_hooks or {}) for each in module.parameters())
    (folder / str(rank)).write_text(json.dumps(results | one.record_facts()["noise_scale"]))
