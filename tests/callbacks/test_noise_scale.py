"""NoiseScaleMonitor: the noise scale of gradients whose noise is known, and a training that it leaves as it is."""

import math
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks.noise_scale import NoiseScaleMonitor, Pair, noise_scale


def pairs_of(gradient: float, noise: float, n: int, b: int, count: int, dims: int = 50) -> list[Pair]:
    """Norms of drawn gradients: |G|² = `gradient`, tr Σ = `noise`."""
    rng = np.random.default_rng(0)
    mean = np.full(dims, math.sqrt(gradient / dims))
    draws = mean + rng.normal(0, math.sqrt(noise / dims / b), (count, n, dims))
    small = (draws**2).sum(-1).mean(-1)
    large = (draws.mean(1) ** 2).sum(-1)
    return [Pair(*values, n, b) for values in zip(small.tolist(), large.tolist(), strict=True)]


@pytest.mark.parametrize(("n", "b"), [(2, 8), (4, 16), (8, 2)])
def test_the_estimates_have_no_bias(n: int, b: int) -> None:
    pairs = pairs_of(gradient=1.0, noise=40.0, n=n, b=b, count=4000)
    assert np.mean([pair.gradient for pair in pairs]) == pytest.approx(1.0, rel=0.1)
    assert np.mean([pair.noise for pair in pairs]) == pytest.approx(40.0, rel=0.05)


def test_the_noise_scale_is_a_ratio_of_sums_within_its_interval() -> None:
    found = noise_scale(pairs_of(gradient=1.0, noise=40.0, n=2, b=8, count=500))
    assert found is not None
    assert found.low < found.value < found.high
    assert found.low < 40 < found.high


def test_the_interval_has_no_upper_end_where_the_gradient_may_be_zero() -> None:
    found = noise_scale(pairs_of(gradient=0.01, noise=40.0, n=2, b=8, count=30))
    assert found is None or math.isinf(found.high)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng_pairs = pairs_of(gradient=1.0, noise=40.0, n=2, b=8, count=100 * 200)
    found = [noise_scale(rng_pairs[at : at + 100]) for at in range(0, len(rng_pairs), 100)]
    held = [one is not None and one.low <= 40 <= one.high for one in found]
    assert np.mean(held) > 0.85


@pytest.mark.parametrize(
    "pairs", [[], [Pair(1.0, 1.0, 2, 4)] * 5, [Pair(1.0, 2.0, 2, 4)] * 50, [Pair(5.0, 1.0, 2, 4)] * 50]
)
def test_what_is_not_known_is_absent(pairs: list[Pair]) -> None:
    """Too few, a negative noise, a negative gradient."""
    assert noise_scale(pairs) is None


class Mean(LightningModule):
    """Learns the mean of samples; the gradient of one is `w - x`, so tr Σ is the samples' variance."""

    def __init__(self, dims: int = 20, lr: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(dims))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.w - batch[0]).square().sum(1).mean() / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(module: LightningModule, callbacks: list[Any], samples: int = 16_000, batch: int = 8, **options: Any) -> Any:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(samples, 20) * 2), batch_size=batch)
    quiet: dict[str, Any] = {
        name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    }
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet, **options)
    trainer.fit(module, loader)
    return trainer


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_training_with_known_noise_gives_its_noise_scale(accumulate: int) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    fit(Mean(), [monitor], accumulate_grad_batches=accumulate)
    found = monitor.recent()  # |G|² = 20, tr Σ = 20 · 4
    assert found is not None
    assert found.low < 4 < found.high
    assert found.value == pytest.approx(4, rel=0.5)


def test_the_training_is_bit_for_bit_the_same() -> None:
    trained = []
    for callbacks in ([], [NoiseScaleMonitor(every_n_steps=3)]):
        module = Mean(lr=0.01)
        fit(module, callbacks, samples=400, gradient_clip_val=1.0)
        trained.append(module.w.detach().clone())
    assert torch.equal(*trained)


def test_what_is_known_is_in_the_record_and_the_last_lines() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    fit(Mean(), [monitor], samples=4000)
    facts = monitor.record_facts()["noise_scale"]
    assert facts["low"] < facts["samples"] < facts["high"]
    assert monitor.summary_lines()[0].startswith("noise   noise scale")


def test_a_short_training_says_why_nothing_is_known() -> None:
    monitor = NoiseScaleMonitor()
    fit(Mean(), [monitor], samples=40)
    assert monitor.summary_lines() == []
    assert "fewer than 10" in monitor.record_facts()["noise_scale"]["missing"]


class Sparse(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 20, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.table(torch.tensor([1])).sum()


def test_sparse_gradients_are_left_alone() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    fit(Sparse(), [monitor], samples=80)
    assert monitor.record_facts()["noise_scale"]["missing"] == "a gradient is sparse"
