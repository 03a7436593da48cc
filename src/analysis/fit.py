"""The time of a step as a function of the batch size, fitted to a few measured sizes.

    t(b) = (floor^p + (slope · b)^p)^(1/p)        floor, slope ≥ 0, p ≥ 1

`floor` is the cost of a step that does not depend on its batch: Python, the framework, launching operations, the update of
the weights. `slope` is the cost of one more sample. p says how the two combine on the device. On a CPU they run one after
the other and add up (p = 1). A GPU works while the host prepares the next operations, so the longer hides the shorter
(p → ∞ is their maximum); measurements lie in between. p is fitted only to five sizes or more, and only if it explains them
clearly better than the usual p of the device: three parameters would fit any three points and predict nothing.

The model does not know that throughput falls at sizes that no longer fit a cache, or that large batches reach kernels which
use the device better. `leave_one_out` measures its error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..records.rates import NEAR_BEST

MIN_SIZES = 3
_SHARPNESS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # candidates for p; 8 is within 1 to 9 % of the maximum
_SERIAL, _ASYNCHRONOUS = 1.0, 3.0
_FREE_SIZES = 5  # from so many sizes on p may be fitted
_OUTLIER = 0.1  # residuals beyond 10 % count in proportion, not squared
_PRECISION = 1e-3  # relative; smaller differences are noise


@dataclass(frozen=True)
class Fit:
    """A fitted model."""

    floor_ms: float  # the time of a step without samples
    slope_ms: float  # the time that a sample adds
    sharpness: float  # p

    def step_ms(self, batch_size: float) -> float:
        """Predicted time of a step, in ms."""
        return float(np.linalg.norm([self.floor_ms, self.slope_ms * batch_size], ord=self.sharpness))

    def samples_per_sec(self, batch_size: float) -> float:
        """Predicted rate."""
        return 1e3 * batch_size / self.step_ms(batch_size)

    @property
    def asymptote(self) -> float:
        """Samples/s of an infinite batch; infinite where no slope was seen."""
        return 1e3 / self.slope_ms if self.slope_ms else math.inf

    @property
    def knee(self) -> float | None:
        """The smallest batch size with a predicted rate near the asymptote; None where no slope was seen."""
        if not self.slope_ms:
            return None
        p = self.sharpness
        return max(1.0, self.floor_ms / self.slope_ms / ((1 - NEAR_BEST) ** -p - 1) ** (1 / p))


def fit_step_time(sizes: Sequence[float], step_ms: Sequence[float], serial: bool = True) -> Fit | None:
    """The model that is nearest to the measured times, by relative error; None with fewer than three distinct sizes.

    `serial` is True where the host waits for each operation, as on a CPU.
    """
    if len(set(sizes)) < MIN_SIZES:
        return None
    b, t = np.log(np.asarray(sizes, float)), np.log(np.asarray(step_ms, float))
    usual = _SERIAL if serial else _ASYNCHRONOUS
    powers = np.array(_SHARPNESS if len(set(sizes)) >= _FREE_SIZES else (usual,))
    crossover, slope, loss = _search(b, t, powers)
    # Schwarz's criterion (BIC): a fitted p has to explain more than one further parameter would.
    score = len(b) * np.log(loss / len(b) + _PRECISION**2) + np.log(len(b)) * (powers != usual)
    best = int(np.argmin(score))
    low, high = _bounds(b)
    floor_ms = math.exp(slope[best] + crossover[best]) if crossover[best] > low else 0.0
    return Fit(floor_ms, math.exp(slope[best]) if crossover[best] < high else 0.0, float(powers[best]))


def leave_one_out(sizes: Sequence[float], step_ms: Sequence[float], serial: bool = True) -> float | None:
    """The median relative error of predicting each size from all others; None with fewer than four distinct sizes."""
    errors = []
    for left_out in sorted(set(sizes)):
        rest = [(b, t) for b, t in zip(sizes, step_ms, strict=True) if b != left_out]
        fit = fit_step_time([b for b, _ in rest], [t for _, t in rest], serial)
        if fit is None:
            return None
        measured = [t for b, t in zip(sizes, step_ms, strict=True) if b == left_out]
        errors += [abs(fit.step_ms(left_out) / t - 1) for t in measured]
    return float(np.median(errors)) if errors else None


def _bounds(b: np.ndarray) -> tuple[float, float]:
    """The log crossovers at which floor and slope both matter: from 1/1000 of the smallest size to 1000 times the largest."""
    return float(b.min()) - math.log(1e3), float(b.max()) + math.log(1e3)


def _search(b: np.ndarray, t: np.ndarray, powers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every p the best log crossover (where slope · b = floor), its log slope, and the loss.

    With t = slope · (crossover^p + b^p)^(1/p) the slope is a shift in log space, found as a robust mean. One parameter is
    left; a grid that is refined around its best value has no local minimum to get stuck in.
    """
    low, high = _bounds(b)
    grid = np.tile(np.linspace(low, high, 121), (len(powers), 1))  # (P, K)
    every = np.arange(len(powers))
    for _ in range(4):
        p = powers[:, None, None]
        shape = np.logaddexp(p * grid[..., None], p * b) / p  # (P, K, n)
        slope, loss = _location(t - shape)
        best = loss.argmin(axis=1)
        found = grid[every, best], slope[every, best], loss[every, best]
        step = (grid[:, 1] - grid[:, 0])[:, None]
        grid = np.clip(found[0][:, None] + step * np.linspace(-1, 1, 21), low, high)
    return found


def _location(residuals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Huber's mean over the last axis, and the loss around it: residuals (P, K, n) → (P, K) each."""
    centre = np.median(residuals, axis=-1)
    for _ in range(8):
        weights = np.minimum(1, _OUTLIER / np.maximum(np.abs(residuals - centre[..., None]), 1e-12))
        centre = (weights * residuals).sum(-1) / weights.sum(-1)
    off = np.abs(residuals - centre[..., None])
    return centre, np.where(off <= _OUTLIER, off**2, _OUTLIER * (2 * off - _OUTLIER)).sum(-1)
