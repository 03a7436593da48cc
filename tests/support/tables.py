"""Tables of updates whose times a test chooses."""

from collections.abc import Sequence
from typing import Any

from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks._timer import PAUSE, Batch, HostClock
from batchscope.callbacks._windows import Window, Windows


def batch(step: int, samples: int = 4, timesteps: int = 0, recorded: bool = False, **ms: float) -> Batch:
    """A trained batch after which `global_step` is so much, with so many ms in each part."""
    parts, moments, now = [], [], 0.0
    for part, duration in ms.items():
        parts.append(part)
        moments.append(now)
        now += duration / 1e3
    return Batch([*parts, PAUSE], [*moments, now], samples, timesteps, step, True, recorded)


def table_of(
    step_ms: Sequence[Any], samples: Sequence[int] | int = 4, disturbed_from: int | None = None, warmup: int = 1
) -> UpdateTable:
    """A table of such steps, all forward, behind the first update of a fit; those from `disturbed_from` on are disturbed.

    Without `disturbed_from` the run has one window, which nobody disturbed.
    """
    steps = [0.001, *step_ms]
    held = [samples] * len(step_ms) if isinstance(samples, int) else list(samples)
    table = UpdateTable(warmup, Windows(1))
    batches = [batch(n, size, forward=ms) for n, (ms, size) in enumerate(zip(steps, [1, *held], strict=True), start=1)]
    table.add(batches, HostClock())
    border = len(steps) if disturbed_from is None else 1 + disturbed_from
    table.windows.all += [Window(1, end=border), Window(border, end=len(steps), disturbed=True)]
    return table
