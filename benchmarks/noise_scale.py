"""The noise scale that NoiseScaleMonitor estimates, against the truth.

    python benchmarks/noise_scale.py

A small network trains by SGD on a fixed set, from which batches are drawn with replacement. tr Σ and |G|² are computed from the
gradient of every sample of the set, in every tenth of the updates that the estimate is of: the monitor's latest 100
comparisons. The truth is the mean tr Σ over the mean |G|². Every update has 256 samples. The bias is the mean over seeds of
estimate ÷ truth − 1, the spread its standard deviation; `held` counts the seeds whose 90 % interval holds the truth. What the
monitor costs is in `monitoring.py`.
"""

import statistics
from typing import Any

import lightning
import torch
from harness import arguments, bare_trainer, in_two_ranks, rows, write_result
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader

from batchscope import NoiseScaleMonitor

SAMPLES, FEATURES, CLASSES = 2000, 20, 5
UPDATE = 256  # samples
COMPARISONS = 100
SEEDS = 6
RATES = (0.0, 0.05, 0.2)
RANKS = "two ranks"
KINDS: dict[str, dict[str, Any]] = {
    "accumulated batches": {"batches": 4},
    RANKS: {"ranks": 2},
    "consecutive updates": {},
}
Estimate = dict[str, Any]


class Learner(lightning.LightningModule):
    """A network that classifies."""

    def __init__(self, net: nn.Module, lr: float):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fixed_set() -> tuple[Tensor, Tensor, nn.Module]:
    """Samples whose labels a random network draws, and a network that has learned a little of it."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES)
    teacher, net = (nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)) for _ in range(2))
    y = torch.multinomial((4 * teacher(x)).softmax(1).detach(), 1)[:, 0]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return x, y, net


class Truth(Callback):
    """tr Σ and |G|² over the whole set, in the updates that the estimate is of."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y, self.noise, self.gradient = x, y, 0.0, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        is_recent = trainer.max_steps - trainer.global_step <= 2 * COMPARISONS
        if is_recent and trainer.global_step % 10 == 4 and batch_idx % trainer.accumulate_grad_batches == 0:
            self._add(pl_module.net)

    def _add(self, net: nn.Module) -> None:
        def loss(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

        weights = {name: each.detach() for name, each in net.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, self.x, self.y)
        gradients = torch.cat([one.flatten(1) for one in each.values()], 1).double()
        mean = float(gradients.mean(0).square().sum())
        self.noise += float(gradients.square().sum(1).mean()) - mean
        self.gradient += mean


def estimate(seed: int, lr: float, batches: int = 1, ranks: int = 1) -> Estimate:
    """A fit, and what it estimates; of two ranks each does this."""
    x, y, net = fixed_set()
    monitor, truth = NoiseScaleMonitor(every_n_steps=2), Truth(x, y)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2} if ranks > 1 else {}
    options |= {"max_steps": 2 * COMPARISONS + 10, "accumulate_grad_batches": batches}
    trainer = bare_trainer("cpu", [monitor, truth], **options)
    torch.manual_seed(2 * seed + trainer.global_rank)
    drawn = torch.randint(SAMPLES, (trainer.max_steps * batches + 1, UPDATE // batches // ranks))
    trainer.fit(Learner(net, lr), DataLoader([(x[at], y[at]) for at in drawn], batch_size=None))
    return monitor.record_facts()["noise_scale"] | {"truth": truth.noise / truth.gradient}


def estimates(kind: str, smallest: bool) -> dict[str, list[Estimate]]:
    """Of each learning rate, one a seed."""
    torch.set_num_threads(1)
    rates, seeds = (RATES[:1], 1) if smallest else (RATES, SEEDS)
    return {str(lr): [estimate(seed, lr, **KINDS[kind]) for seed in range(seeds)] for lr in rates}


def row(kind: str, lr: str, found: list[Estimate]) -> list[str]:
    known = [one for one in found if "samples" in one]
    ratios = [100 * (one["samples"] / one["truth"] - 1) for one in known]
    held = sum(one["low"] <= one["truth"] <= one.get("high", float("inf")) for one in known)
    truth = statistics.mean(one["truth"] for one in found)
    numbers = ["–", "–"]
    if len(known) > 1:
        numbers = [f"{statistics.mean(ratios):+.1f} %", f"{statistics.stdev(ratios):.1f} %"]
    return [kind, lr, f"{truth:.0f}", *numbers, f"{held} of {len(found)}"]


def main() -> None:
    args = arguments(__doc__).parse_args()
    data = {kind: estimates(kind, args.smallest) for kind in KINDS if kind != RANKS}
    data[RANKS] = in_two_ranks(estimates, RANKS, args.smallest)
    lines = [row(kind, lr, found) for kind in KINDS for lr, found in data[kind].items()]
    head = ["gradients of", "learning rate", "true noise scale", "bias", "spread", "held"]
    write_result("noise_scale", rows(head, lines, words=2), {"accuracy": data}, args)


if __name__ == "__main__":
    main()
