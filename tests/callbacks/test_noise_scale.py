"""NoiseScaleMonitor: the noise scale of gradients whose noise is known, and why one is not known."""

import math

import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks.noise_scale import Estimate, NoiseScaleMonitor, noise_scale
from tests.support.third_party_modules import train


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


def test_the_interval_holds_the_noise_scale_as_often_as_it_says() -> None:
    drawn = estimates_of(gradient=1.0, noise=40.0, n=2, b=8, count=100 * 200)
    found = [noise_scale(drawn[at : at + 100]) for at in range(0, len(drawn), 100)]
    assert all(one.low < one.value < one.high for one in found)
    assert 0.85 < np.mean([one.low <= 40 <= one.high for one in found]) < 0.97


def test_the_interval_has_no_upper_end_where_the_gradient_may_be_zero() -> None:
    assert math.isinf(noise_scale(estimates_of(gradient=0.01, noise=40.0, n=2, b=8, count=30)).high)


def test_what_is_not_known_is_absent() -> None:
    assert noise_scale([Estimate(1.0, 1.0)] * 9) is None
    assert noise_scale([Estimate(-1.0, 1.0)] * 50) is None  # a negative noise
    assert noise_scale([Estimate(1.0, -1.0)] * 50) is None


class Mean(LightningModule):
    """Learns the mean of samples; the gradient of one is `w - x`: |G|² = 20, and tr Σ = 20 · 4 is the samples' variance."""

    def __init__(self, step=None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(20))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.step = step

    def training_step(self, batch):
        loss = (self.w - batch[0]).square().sum(1).mean() / 2
        return loss if self.step is None else self.step(self, loss)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.w.grad is not None:
            self.w.grad.nan_to_num_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_noisy(module: LightningModule, monitor: NoiseScaleMonitor, samples: int = 1200, seed: int = 1, **options):
    generator = torch.Generator().manual_seed(seed)
    data = DataLoader(TensorDataset(torch.randn(samples, 20, generator=generator) * 2), batch_size=8)
    return train(module, monitor, data=data, **{"max_epochs": 1, **options})


SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
NO_GRADIENT_IN_BETWEEN = Mean(lambda module, loss: None if module.global_step % 3 == 2 else loss)
NOT_A_NUMBER_ONCE = Mean(lambda module, loss: loss * (math.nan if module.global_step == 40 else 1))


@pytest.mark.parametrize(
    ("module", "options", "of"),
    [
        (Mean(), SCALED, "updates"),
        (Mean(), SCALED | {"accumulate_grad_batches": 4}, "batches"),
        (Mean(), {"gradient_clip_val": 0.1, "precision": "bf16-true"}, "updates"),
        (NO_GRADIENT_IN_BETWEEN, {}, "updates"),
        (NO_GRADIENT_IN_BETWEEN, {"accumulate_grad_batches": 4}, "batches"),
        (NOT_A_NUMBER_ONCE, {}, "updates"),
        (NOT_A_NUMBER_ONCE, {"accumulate_grad_batches": 2}, "batches"),
    ],
)
def test_a_training_with_known_noise_gives_its_noise_scale(module, options, of) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    fit_noisy(module, monitor, **options)
    facts = monitor.record_facts()["noise_scale"]
    assert facts["low"] < 4 < facts["high"]
    assert (facts["samples"], facts["of"]) == (pytest.approx(4, rel=0.5), of)
    assert monitor.summary_lines()[0].startswith("noise   noise scale")


def by_hand() -> Mean:
    module = Mean(lambda module, loss: module.manual_backward(loss))
    module.automatic_optimization = False
    return module


def sparse() -> Mean:
    module = Mean(lambda module, loss: loss + module.table(torch.tensor([1])).sum())
    module.table = nn.Embedding(5, 20, sparse=True)
    return module


@pytest.mark.filterwarnings("ignore:NoiseScaleMonitor stopped measuring")
@pytest.mark.parametrize(
    ("module", "options", "why"),
    [
        (Mean(), {"samples": 40}, "fewer than 10"),
        (Mean(), {"samples": 24, "accumulate_grad_batches": 2}, "fewer than 10"),
        (by_hand(), {}, "by hand"),
        (sparse(), {}, "sparse"),
        (sparse(), {"accumulate_grad_batches": 2}, "sparse"),
        (Mean(lambda module, loss: (module.w * 0).sum()), {}, "not positive"),
    ],
)
def test_what_cannot_be_known_is_said(module: LightningModule, options, why: str) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    assert fit_noisy(module, monitor, **{"samples": 400, **options}).state.finished
    assert monitor.summary_lines() == []
    assert why in monitor.record_facts()["noise_scale"]["missing"]
