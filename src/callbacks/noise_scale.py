"""NoiseScaleMonitor: the gradient noise scale, by which progress per sample falls with the batch size.

McCandlish et al. 2018 (An Empirical Model of Large-Batch Training): with the true gradient G and the covariance Σ of the
gradient of one sample, the noise scale is φ = tr Σ / |G|². A step of a batch of B samples makes φ/(φ + B) of the progress that
its samples would make in small batches: half of it at B = φ.

Gradients at two batch sizes tell φ. Of n gradients g of b samples each, with l the mean of |g|² and t = |mean of g|²,

    |G|² = (n·t − l) / (n − 1)        tr Σ = n·b·(l − t) / (n − 1)

have no bias. l may be |g|² of any one of them. A ratio of their sums over many updates is φ; a mean of ratios would be wrong.
"""

import contextlib
import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import numpy
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from scipy.special import stdtrit
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from .._torch import gradient_scale, has_comm_hook, has_compiled
from ..options.types import PositiveInt
from ..random_state import random_state, restore_random_state
from ..records.formatting import significant
from ..records.terminal import row
from ._batches import samples_in
from ._deferred_scalars import DeferredScalars
from ._in_order import join, leave
from ._never_raise import never_raise
from ._timer import pause
from ._writer import StepWriter

KEY = "train/noise_scale"
CONFIDENCE = 0.9
FEWEST = 10  # comparisons that are enough for an interval
READ_EVERY = 50  # updates: norms are copied together, and so late the earlier ones have arrived
_FIRST = 4  # updates that are left alone: the operations of 2 to 4 are recorded
_RECENT = 100  # comparisons that the present noise scale is of: it grows in the course of a training


class Estimate(NamedTuple):
    """Of one comparison, both without bias; they may be negative."""

    noise: float  # tr Σ, in the gradient's unit squared times samples
    gradient: float  # |G|²

    @classmethod
    def of(cls, small: float, large: float, n: int, b: int) -> Self:
        """From the mean |g|² of gradients of b samples, and that of the mean of n of them."""
        return cls(n * b * (small - large) / (n - 1), (n * large - small) / (n - 1))


class NoiseScale(NamedTuple):
    """φ in samples and the ends of its 90 % interval; the upper one is infinite where |G|² may be 0."""

    value: float
    low: float
    high: float


def noise_scale(found: Iterable[Estimate]) -> NoiseScale | None:
    """The ratio of the means of both estimates, by Beale's estimator, with Fieller's interval.

    Beale's takes out most of the bias that a ratio has where its denominator is not known well. None where one of the means is
    not positive, or fewer than 10 comparisons are known.
    """
    estimates = numpy.array(list(found)).reshape(-1, 2)
    count = len(estimates)
    if count < FEWEST:
        return None
    x, y = estimates.mean(0).tolist()
    if not (math.isfinite(x) and math.isfinite(y)) or x <= 0 or y <= 0:
        return None
    (xx, xy), (_, yy) = (numpy.cov(estimates.T) / count).tolist()
    t2 = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) ** 2
    a, b, c = y * y - t2 * yy, x * y - t2 * xy, x * x - t2 * xx
    root = math.sqrt(max(b * b - a * c, 0.0))
    low = max(0.0, c / (b + root)) if b + root > 0 else 0.0
    if a <= 0:  # |G|² is not shown to be positive, and Beale's expansion does not hold
        return NoiseScale(x / y, low, math.inf)
    return NoiseScale(x / y * (1 + xy / (x * y)) / (1 + yy / y**2), low, (b + root) / a)


class _Gradients(NamedTuple):
    """Of one batch: a tensor a parameter, times the scale that a gradient scaler had, and the batch's samples."""

    tensors: list[Tensor]
    scale: Tensor | float
    samples: int

    def dot(self, other: "_Gradients") -> Tensor:
        """The scalar product without scales, a tensor without dimensions that stays on the device."""
        return _sum([_dot(a, b) for a, b in zip(self.tensors, other.tensors, strict=True)]) / self.scale / other.scale


class NoiseScaleMonitor(Callback):
    """Estimates the gradient noise scale from the gradients that a training computes anyway.

    | Gradients that are compared | Where | Bias | Memory |
    | --- | --- | --- | --- |
    | of the batches that an update accumulates, and of DDP's ranks before they are averaged | an update has several | none | none |
    | of the two halves of a batch, computed beside the training | `halves=True` | none | two gradients, and half a batch's activations |
    | of two consecutive updates | else | by what the update changed in the gradient (as in Pollux, Qiao et al. 2021) | one gradient |

    Gradients are taken before clipping, and unscaled. Training is bit for bit the same with and without this callback.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `train/noise_scale` | samples | the batch size at which half of the samples' progress is lost to noise |

    Halves are computed by a copy of the module that shares its parameters and datasets: its buffers, metrics and other
    attributes are not touched, and random generators are restored. What `training_step` changes elsewhere is changed
    twice.

    Args:
        every_n_steps: how many updates apart gradients are compared; 2 at least. A comparison of halves takes as long as a step.
        halves: compare the halves of a batch where an update has one batch.
    """

    observes_only = True

    def __init__(self, every_n_steps: PositiveInt = 20, halves: bool = False):
        self.every_n_steps = max(2, every_n_steps)  # two consecutive updates are compared
        self.halves = halves
        self._hooks: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self.failure: str | None = None
        self.estimates: deque[Estimate] = deque(maxlen=_RECENT)
        self._missing = ""
        self._of = ""  # which gradients are compared
        self._samples = 0  # of this batch
        self._parts: dict[int, Tensor] = {}  # |g|² of each parameter in this batch
        self._batches: list[tuple[int, int, Tensor]] = []  # update, samples and |g|² of each of its batches so far
        self._before: _Gradients | None = None  # of the update before
        self._norms: list[tuple[int, int, int, Tensor, Tensor]] = []  # update, n, b, and both squares on the device
        self._sent: deque[tuple[list[tuple[int, int, int]], DeferredScalars]] = deque()

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        self._writer, self._step = StepWriter(trainer), trainer.global_step
        join(trainer, self)
        model = trainer.strategy.model
        if not pl_module.automatic_optimization:
            self._missing = "the module optimises by hand"
        elif isinstance(model, DistributedDataParallel):
            self._missing = "a communication hook may change the gradients" if has_comm_hook(model) else ""
        elif trainer.world_size > 1 or isinstance(trainer.strategy, ModelParallelStrategy):
            self._missing = "no process has a whole gradient of its own"

    def _since_due(self, trainer: Trainer) -> int:
        """0 in an update with a comparison, 1 in the one after it."""
        since = trainer.global_step - _FIRST
        return since % self.every_n_steps if since >= 0 and not self._missing else -1

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._samples = samples_in(batch)
        several = trainer.accumulate_grad_batches * trainer.world_size > 1  # a callback may change it between epochs
        self._of = "batches" if several else "halves" if self.halves else "updates"
        if self._of == "halves" and self._since_due(trainer) == 0 and self._samples > 1:
            with pause(trainer):
                self._compare(trainer, *_halves(trainer, pl_module, batch, batch_idx, self._samples))

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._of == "batches" and self._since_due(trainer) == 0:
            trained = _trained(pl_module)  # a hook sees the gradient of one batch on one rank
            self._hooks = [one.register_hook(partial(self._note, at)) for at, one in enumerate(trained)]

    @never_raise
    def _note(self, at: int, gradient: Tensor) -> None:
        if at in self._parts:
            self._missing = "a gradient comes in several parts"
        else:
            self._parts[at] = _dot(gradient, gradient)

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unhook()
        (before, self._before), (parts, self._parts) = (self._before, None), (self._parts, {})
        since = self._since_due(trainer)
        if parts and since == 0:
            self._compare_batches(trainer, pl_module, _sum([*parts.values()]))
        elif self._of == "updates" and since in (0, 1) and self._samples:
            now = _gradients(trainer, pl_module, self._samples)
            if since == 0:
                self._before = now._replace(tensors=[one.clone() for one in now.tensors])
            elif before is not None and len(before.tensors) == len(now.tensors) and before.samples == now.samples:
                self._compare(trainer, before, now)

    def _compare(self, trainer: Trainer, one: _Gradients, other: _Gradients) -> None:
        small = (one.dot(one) + other.dot(other)) / 2
        self._norms.append((trainer.global_step, 2, one.samples, small, (small + one.dot(other)) / 2))

    def _compare_batches(self, trainer: Trainer, pl_module: LightningModule, square: Tensor) -> None:
        """Lightning divides the loss of each of n batches by n. Each rank knows the squares of its own batches."""
        step, n = trainer.global_step, trainer.accumulate_grad_batches
        self._batches = [*(one for one in self._batches if one[0] == step), (step, self._samples, square)]
        uneven = len({samples for _, samples, _ in self._batches}) > 1
        if len(self._batches) < n or uneven or (trainer.world_size > 1 and trainer.is_last_batch):
            return  # the last batches of an epoch may differ between ranks
        mean = _gradients(trainer, pl_module, self._samples)
        small = torch.stack([square for *_, square in self._batches]).mean() * n**2 / mean.scale**2
        self._norms.append((step, n * trainer.world_size, self._samples, small, mean.dot(mean)))

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step
        if self._step % READ_EVERY == 0:
            self._read(wait=False)

    def oldest_step(self) -> float:
        """The first step of which an estimate is still to be read."""
        if pending := self._sent[0][0] if self._sent else self._norms:
            return pending[0][0]
        return math.inf if self._missing else self._step

    def _read(self, wait: bool) -> None:
        """Start to copy the new norms to the host, read those that are there, or with `wait` all, and write the curve."""
        if self._norms:
            scalars = DeferredScalars([square for norms in self._norms for square in norms[3:]])
            self._sent.append(([norms[:3] for norms in self._norms], scalars))
            self._norms = []
        last = None
        while self._sent and (wait or self._sent[0][1].ready()):
            known, scalars = self._sent.popleft()
            values, last = scalars.values(), known[-1][0]
            for (_, n, b), small, large in zip(known, values[::2], values[1::2], strict=True):
                if math.isfinite(small) and math.isfinite(large):
                    self.estimates.append(Estimate.of(small, large, n, b))
        if last is not None and (found := self.recent()) is not None:
            self._writer.write_rows([(last, {KEY: found.value})])

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = None
        self._read(wait=True)
        leave(trainer, self)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._unhook()
        leave(trainer, self)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave(trainer, self)  # where the estimate has failed

    def disable(self) -> None:
        """Estimate nothing more in this fit."""
        self._missing = self._missing or "the estimate has failed"
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def recent(self) -> NoiseScale | None:
        """The noise scale of the latest hundred comparisons."""
        return noise_scale(self.estimates)

    def record_facts(self) -> dict[str, Any]:
        """What is known at the end of training, in samples; `of` are the gradients: batches (and ranks), halves or updates."""
        found = self.recent()
        if found is None:
            few = f"fewer than {FEWEST} gradients could be compared"
            why = few if len(self.estimates) < FEWEST else "the estimate is not positive"
            return {"noise_scale": {"missing": self.failure or self._missing or why}}
        ends = {"low": found.low} | ({"high": found.high} if math.isfinite(found.high) else {})
        return {"noise_scale": {"samples": found.value, **ends, "pairs": len(self.estimates), "of": self._of}}

    def summary_lines(self) -> list[str]:
        """A line of the run's last lines; none where nothing is known."""
        found = self.recent()
        if found is None:
            return []
        high = f"to {significant(found.high)}" if math.isfinite(found.high) else "or more"
        return [row("noise", f"noise scale {significant(found.value)} samples ({significant(found.low)} {high})")]


def _halves(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, samples: int
) -> Iterator[_Gradients]:
    """The gradients of both halves of a batch of any type, computed by a copy of the module with the same parameters."""
    attributes = [value for part in module.modules() for value in vars(part).values()]
    shared = [trainer, *module.parameters(), *(one for one in attributes if isinstance(one, Dataset | DataLoader))]
    twin: Any = copy.deepcopy(module, {id(one): one for one in shared})  # not compiled
    twin.trainer, twin.log = trainer, lambda *args, **options: None
    trained, scale, state = _trained(module), _scale(trainer), random_state()
    rest = (batch_idx,) if is_param_in_hook_signature(twin.training_step, "batch_idx", min_args=2) else ()
    half = samples // 2
    try:
        for part in (slice(half), slice(half, 2 * half)):
            inputs = apply_to_collection(batch, Tensor, _some, part, samples)
            eager = torch.compiler.set_stance("force_eager") if has_compiled() else contextlib.nullcontext()
            with eager, trainer.precision_plugin.train_step_context():
                result = twin.training_step(inputs, *rest)
            loss = result["loss"] if isinstance(result, Mapping) else result
            yield _Gradients([*torch.autograd.grad(loss * scale, trained, materialize_grads=True)], scale, half)
    finally:
        restore_random_state(state)


def _some(tensor: Tensor, part: slice, samples: int) -> Tensor:
    if tensor.dim() and len(tensor) != samples:
        raise ValueError(f"a batch of {samples} samples holds a tensor of {len(tensor)}, and cannot be halved")
    return tensor[part] if tensor.dim() else tensor


def _gradients(trainer: Trainer, module: LightningModule, samples: int) -> _Gradients:
    """What the last backward pass has left."""
    return _Gradients([one.grad for one in _trained(module) if one.grad is not None], _scale(trainer), samples)


def _trained(module: LightningModule) -> list[Parameter]:
    return [one for one in module.parameters() if one.requires_grad]


def _scale(trainer: Trainer) -> Tensor | float:
    """What the gradients are multiplied by under 16-mixed, as it is now."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else gradient_scale(scaler)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    if one.layout != torch.strided:
        raise TypeError("a gradient is sparse")
    a, b = (torch.view_as_real(each) if each.is_complex() else each for each in (one, other))
    return torch.dot(a.flatten().float(), b.flatten().float())


def _sum(scalars: list[Tensor]) -> Tensor:
    return torch.stack([one.to(scalars[0].device) for one in scalars]).sum()
