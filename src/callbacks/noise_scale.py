"""NoiseScaleMonitor: the gradient noise scale, by which progress per sample falls with the batch size.

McCandlish et al. 2018 (An Empirical Model of Large-Batch Training): with the true gradient G and the covariance Σ of the
gradient of one sample, the noise scale is φ = tr Σ / |G|². A step of a batch of B samples makes φ/(φ + B) of the progress that
its samples would make in small batches: half of it at B = φ.

Gradients at two batch sizes tell φ. Of n gradients g of b samples each, with l the mean of |g|² and t = |mean of g|²,

    |G|² = (n·t − l) / (n − 1)        tr Σ = n·b·(l − t) / (n − 1)

have no bias. A ratio of their sums over many updates is φ; a mean of ratios would be wrong.
"""

import math
from collections import deque
from typing import Any, NamedTuple

import numpy
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from scipy.special import stdtrit
from torch import Tensor
from torch.nn.utils import get_total_norm
from typing_extensions import override

from .._torch import added
from ..options.types import PositiveInt
from ..records.formatting import significant
from ..records.terminal import row
from ._batches import samples_in
from ._deferred_scalars import DeferredScalars
from ._never_raise import never_raise
from ._writer import StepWriter

KEY = "train/noise_scale"
CONFIDENCE = 0.9
FEWEST = 10  # pairs of gradients that are enough for an interval
READ_EVERY = 50  # updates: norms are copied together, and so late the earlier ones have arrived
_RECENT = 100  # pairs that the present noise scale is of: it grows in the course of a training


class Pair(NamedTuple):
    """Squared norms of gradients at two batch sizes: the mean of those of b samples, and that of the mean of n of them."""

    small: float
    large: float
    n: int
    b: int

    @property
    def gradient(self) -> float:
        """An estimate of |G|² without bias; it may be negative."""
        return (self.n * self.large - self.small) / (self.n - 1)

    @property
    def noise(self) -> float:
        """An estimate of tr Σ without bias, in the gradient's unit squared times samples; it may be negative."""
        return self.n * self.b * (self.small - self.large) / (self.n - 1)


class NoiseScale(NamedTuple):
    """φ in samples and the ends of its 90 % interval; the upper one is infinite where |G|² may be 0."""

    value: float
    low: float
    high: float


def noise_scale(pairs: list[Pair]) -> NoiseScale | None:
    """The ratio of the sums of both estimates with Fieller's interval; None where it is unknown or not positive."""
    if len(pairs) < FEWEST:
        return None
    noise, gradient = (numpy.array(values) for values in zip(*((p.noise, p.gradient) for p in pairs), strict=True))
    x, y = float(noise.mean()), float(gradient.mean())
    if not (math.isfinite(x) and math.isfinite(y)) or x <= 0 or y <= 0:
        return None
    (xx, xy), (_, yy) = (numpy.cov(noise, gradient) / len(pairs)).tolist()
    t2 = float(stdtrit(len(pairs) - 1, 0.5 + CONFIDENCE / 2)) ** 2
    a, b, c = y * y - t2 * yy, x * y - t2 * xy, x * x - t2 * xx
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a <= 0:  # |G|² is not shown to be positive
        return NoiseScale(x / y, max(0.0, c / (b + root)) if b + root > 0 else 0.0, math.inf)
    return NoiseScale(x / y, max(0.0, (b - root) / a), (b + root) / a)


class NoiseScaleMonitor(Callback):
    """Estimates the gradient noise scale from the gradients that a training computes anyway.

    Where an update accumulates n batches, their gradients are compared with each other. Otherwise the gradients of two
    consecutive updates are: their parameters differ by one step, which adds to the noise, so the noise scale is too large
    by what the true gradient changes in a step (Pollux, Qiao et al. 2021, does the same). Gradients are taken before
    clipping. Training is bit for bit the same with and without this callback.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `train/noise_scale` | samples | the batch size at which half of the samples' progress is lost to noise |

    Under Adam the noise scale of the gradient is that of another step than the one that is taken, and batch
    normalisation makes samples of a batch depend on each other: then it tells the order of magnitude.

    Args:
        every_n_steps: how many updates apart gradients are compared. Each comparison takes one or two passes over the
            gradients and, meanwhile, their memory once more.
    """

    observes_only = True

    def __init__(self, every_n_steps: PositiveInt = 10):
        self.every_n_steps = max(2, every_n_steps)  # two consecutive updates are compared
        self.failure: str | None = None
        self._reset()

    def _reset(self) -> None:
        self.pairs: list[Pair] = []
        self._norms: list[tuple[int, int, int, Tensor, Tensor]] = []  # step, n, b, and both squares on the device
        self._sent: deque[tuple[list[tuple[int, int, int]], DeferredScalars]] = deque()
        self._before: list[Tensor] | None = None  # gradients of the batch or the update before
        self._squares: list[Tensor] = []  # |g|² of each batch of this update
        self._sizes: list[int] = []  # samples of each of them
        self._batch = 0
        self._missing = ""
        self._rows: list[tuple[int, dict[str, float]]] = []

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        self._writer = StepWriter(trainer)
        self._parameters = [one for one in pl_module.parameters() if one.requires_grad]
        self._missing = self._why_not(trainer, pl_module)

    @staticmethod
    def _why_not(trainer: Trainer, pl_module: LightningModule) -> str:
        if not pl_module.automatic_optimization:
            return "the module optimises by hand"
        if isinstance(trainer.strategy, ModelParallelStrategy):
            return "each process has a part of the gradients"
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return "the gradients of 16-mixed are scaled, and the scale changes"
        if trainer.world_size > 1 and trainer.accumulate_grad_batches > 1:
            return "batches are accumulated in each process alone"
        return ""

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = samples_in(batch)

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        n = trainer.accumulate_grad_batches
        at = trainer.global_step % self.every_n_steps
        if self._missing or not (at == 0 or (n == 1 and at == 1)):
            self._before = None
            return
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        if any(one.layout != torch.strided for one in gradients):
            self._missing = "a gradient is sparse"
            return
        if n == 1:
            self._compare_updates(trainer, gradients, first=at == 0)
        else:
            self._compare_batches(trainer, gradients, n)

    def _compare_updates(self, trainer: Trainer, gradients: list[Tensor], first: bool) -> None:
        samples = self._batch * trainer.world_size
        before, self._before = self._before, [one.clone() for one in gradients] if first else None
        sizes, self._sizes = self._sizes, [samples]
        if not first and before is not None and len(before) == len(gradients) and sizes == [samples]:
            mean = added(before, gradients)
            small = (_square(before) + _square(gradients)) / 2
            self._norms.append((trainer.global_step, 2, samples, small, _square(mean) / 4))

    def _compare_batches(self, trainer: Trainer, gradients: list[Tensor], n: int) -> None:
        """Gradients are sums so far, and Lightning divides each batch's loss by n."""
        if self._before is None:
            self._squares, self._sizes, new = [], [], gradients
        elif len(self._before) == len(gradients):
            new = added(gradients, self._before, -1)
        else:
            return
        self._squares.append(_square(new) * n**2)
        self._sizes.append(self._batch)
        self._before = [one.clone() for one in gradients] if len(self._squares) < n else None
        if len(self._squares) == n and len(set(self._sizes)) == 1:
            small = torch.stack(self._squares).mean()
            self._norms.append((trainer.global_step, n, self._batch, small, _square(gradients)))

    def _send(self) -> None:
        """Start the copy of all new norms to the host; they are read once they have arrived."""
        if self._norms:
            self._sent.append(
                ([norms[:3] for norms in self._norms], DeferredScalars([x for n in self._norms for x in n[3:]]))
            )
            self._norms = []

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % READ_EVERY == 0:
            self._read(wait=False)  # what was sent before
            self._send()
            self._write()

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = None
        self._send()
        self._read(wait=True)
        self._write()

    def _read(self, wait: bool) -> None:
        while self._sent and (wait or self._sent[0][1].ready()):
            known, scalars = self._sent.popleft()
            values = scalars.values()
            for (step, n, b), small, large in zip(known, values[::2], values[1::2], strict=True):
                if math.isfinite(small) and math.isfinite(large):
                    self.pairs.append(Pair(small, large, n, b))
                if (found := self.recent()) is not None:
                    self._rows.append((step, {KEY: found.value}))

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        self._writer.write_rows(rows)

    def recent(self) -> NoiseScale | None:
        """The noise scale of the latest hundred comparisons."""
        return noise_scale(self.pairs[-_RECENT:])

    def disable(self) -> None:
        """Estimate nothing more in this fit."""
        self._missing = self._missing or "it has failed"
        self._before = None

    def record_facts(self) -> dict[str, Any]:
        """What is known at the end of training, in samples."""
        found = self.recent()
        if found is None:
            return {"noise_scale": {"missing": self._missing or f"fewer than {FEWEST} gradients could be compared"}}
        ends = {"low": found.low} | ({"high": found.high} if math.isfinite(found.high) else {})
        return {"noise_scale": {"samples": found.value, **ends, "pairs": len(self.pairs[-_RECENT:])}}

    def summary_lines(self) -> list[str]:
        """A line of the run's last lines; none where nothing is known."""
        found = self.recent()
        if found is None:
            return []
        high = f"to {significant(found.high)}" if math.isfinite(found.high) else "or more"
        return [row("noise", f"noise scale {significant(found.value)} samples ({significant(found.low)} {high})")]


def _square(tensors: list[Tensor]) -> Tensor:
    """The sum of all squares, a tensor without dimensions that stays on the device."""
    return get_total_norm(tensors).float().square()
