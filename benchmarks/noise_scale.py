"""The noise scale that NoiseScaleMonitor estimates, against the truth; and what the monitor costs.

    python benchmarks/noise_scale.py

**Truth.** A small network trains by SGD on a fixed set, from which batches are drawn with replacement. tr Σ and |G|² are
computed from the gradient of every sample of the set, in every tenth of the updates that the estimate is of: the monitor's
latest 100 comparisons. The truth is the mean tr Σ over the mean |G|². Every update has 256 samples. The bias is the mean over
seeds of estimate ÷ truth − 1, the spread its standard deviation; `held` counts the seeds whose 90 % interval holds the truth.

**Cost.** The processor time within the monitor's hooks as a share of the rest, in blocks of `every_n_steps` updates: one
comparison each. Reading what the monitor has evicted from the cache is not in it. Of the models one does much arithmetic for each
parameter, the other one little.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch
from harness import RESULTS, median, write_result
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader

from batchscope.callbacks.noise_scale import NoiseScaleMonitor

SAMPLES, FEATURES, CLASSES = 2000, 20, 5
UPDATE = 256  # samples
COMPARISONS = 100
RATES = (0.0, 0.05, 0.2)
KINDS: dict[str, dict[str, Any]] = {
    "accumulated batches": {"batches": 4},
    "two ranks": {"ranks": 2},
    "two halves": {"halves": True},
    "consecutive updates": {},
}
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
)

Estimate = dict[str, Any]


class Learner(lightning.LightningModule):
    """Any network that classifies."""

    def __init__(self, net: nn.Module, lr: float, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD):
        super().__init__()
        self.net, self.lr, self.kind = net, lr, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=self.lr)  # type: ignore[call-arg]


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


def estimate(seed: int, lr: float, batches: int = 1, ranks: int = 1, halves: bool = False) -> Estimate:
    """A fit, and what it estimates; of two ranks each does this."""
    x, y, net = fixed_set()
    monitor, truth = NoiseScaleMonitor(every_n_steps=2, halves=halves), Truth(x, y)
    options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False} if ranks > 1 else {}
    options |= {"max_steps": 2 * COMPARISONS + 10, "accumulate_grad_batches": batches, **QUIET}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[monitor, truth], **options)
    torch.manual_seed(2 * seed + trainer.global_rank)
    drawn = torch.randint(SAMPLES, (trainer.max_steps * batches + 1, UPDATE // batches // ranks))
    trainer.fit(Learner(net, lr), DataLoader([(x[at], y[at]) for at in drawn], batch_size=None))
    return monitor.record_facts()["noise_scale"] | {"truth": truth.noise / truth.gradient}


def estimates(kind: str, seeds: int, rates: Sequence[float] = RATES) -> dict[str, list[Estimate]]:
    """Of each learning rate, one a seed."""
    return {str(lr): [estimate(seed, lr, **KINDS[kind]) for seed in range(seeds)] for lr in rates}


def estimates_of_ranks(seeds: int) -> dict[str, list[Estimate]]:
    """The same in a process that becomes the first of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run([sys.executable, __file__, "--seeds", str(seeds), "--rank-to", str(out)], check=True)
        return json.loads(out.read_text())


def accuracy_row(kind: str, lr: str, found: list[Estimate]) -> str:
    known = [one for one in found if "samples" in one]
    ratios = [100 * (one["samples"] / one["truth"] - 1) for one in known]
    held = sum(one["low"] <= one["truth"] <= one.get("high", float("inf")) for one in known)
    truth = statistics.mean(one["truth"] for one in found)
    numbers = f"{statistics.mean(ratios):+.1f} % | {statistics.stdev(ratios):.1f} %" if len(known) > 1 else "|"
    return f"| {kind} | {lr} | {truth:.0f} | {numbers} | {held} of {len(found)} |"


class Timed(NoiseScaleMonitor):
    """Notes, at the start of each block of `every_n_steps` updates, the processor time so far, and that within its hooks."""

    def __init__(self, every_n_steps: int, halves: bool):
        super().__init__(every_n_steps, halves)
        self.inside, self.marks = 0.0, []

    def on_train_batch_start(self, trainer: Any, *parts: Any) -> None:
        if trainer.global_step // self.every_n_steps == len(self.marks):
            self.marks.append((time.process_time(), self.inside))
        timed(NoiseScaleMonitor.on_train_batch_start)(self, trainer, *parts)


def timed(hook: Any) -> Any:
    def run(self: Timed, *parts: Any) -> None:
        began = time.process_time()
        hook(self, *parts)
        self.inside += time.process_time() - began

    return run


for name in ("on_before_backward", "_note", "on_after_backward", "on_train_batch_end"):
    setattr(Timed, name, timed(getattr(NoiseScaleMonitor, name)))


def network(name: str) -> nn.Module:
    if name == "MLP":
        return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *layers, nn.Linear(4608, 10))


def cost(name: str, samples: int, kind: str, every: int, blocks: int) -> dict[str, Any]:
    """Of a fit, whose first block warms up."""
    monitor, batches = Timed(every, KINDS[kind].get("halves", False)), KINDS[kind].get("batches", 1)
    options = {"max_steps": (blocks + 1) * every + 1, "accumulate_grad_batches": batches, **QUIET}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[monitor], **options)
    batch, net = (torch.randn(samples // batches, 784), torch.randint(10, (samples // batches,))), network(name)
    loader = DataLoader([batch] * (trainer.max_steps * batches), batch_size=None)
    trainer.fit(Learner(net, 1e-3, torch.optim.AdamW), loader)
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(monitor.marks[1:])]
    return {
        "fit": f"{name}, {samples} samples | {kind} | {every}",
        "ms": [1e3 * (whole - inside) / every for whole, inside in steps],
        "percent": [100 * inside / (whole - inside) for whole, inside in steps],
        "mib": sum(one.nbytes for one in net.parameters()) / 2**20,
    }


def cost_row(found: dict[str, Any]) -> str:
    shown = f"{median(found['percent']):.2f} % ({min(found['percent']):.2f}–{max(found['percent']):.2f})"
    return f"| {found['fit']} | {median(found['ms']):.1f} | {shown} | {found['mib']:.1f} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=6, help="for the cost")
    parser.add_argument(
        "--part", choices=("accuracy", "cost"), help="measure it alone, and keep the rest of the result"
    )
    parser.add_argument(
        "--smallest", action="store_true", help="two seeds, one rate, no ranks, no cost; writes no result"
    )
    parser.add_argument("--rank-to", type=Path, help=argparse.SUPPRESS)  # two ranks; the first one writes there
    args = parser.parse_args(words)
    if args.rank_to:
        found = estimates("two ranks", args.seeds)
        if not torch.distributed.get_rank():
            args.rank_to.write_text(json.dumps(found))
        return
    head = "| gradients of | learning rate | true noise scale | bias | spread | held |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    if args.smallest:
        rows = [accuracy_row(kind, "0.0", estimates(kind, 2, [0.0])["0.0"]) for kind in KINDS if kind != "two ranks"]
        print("\n".join([head, *rows]))
        return
    file = RESULTS / "noise_scale.json"
    data = json.loads(file.read_text()) if args.part and file.exists() else {}
    if args.part != "cost":
        data["accuracy"] = {
            kind: estimates_of_ranks(args.seeds) if kind == "two ranks" else estimates(kind, args.seeds)
            for kind in KINDS
        }
    if args.part != "accuracy":
        everies = {"consecutive updates": 20, "accumulated batches": 20, "two halves": 50}
        models = [("CNN", 64), ("MLP", 16)]
        data["cost"] = [cost(*model, kind, every, args.blocks) for model in models for kind, every in everies.items()]
    head2 = "\n| fit | gradients of | every_n_steps | processor ms/update | the monitor's (median, range) | MiB of a gradient |"
    table = [
        *(
            head,
            *(
                accuracy_row(kind, lr, one)
                for kind, each in data.get("accuracy", {}).items()
                for lr, one in each.items()
            ),
        ),
        *(head2, "| --- | --- | ---: | ---: | --- | ---: |", *map(cost_row, data.get("cost", []))),
    ]
    write_result("noise_scale", "\n".join(table), data | {"machine": None})


if __name__ == "__main__":
    main()
