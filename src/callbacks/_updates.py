"""Updates: which batches end an update, and how many there were, whatever Lightning's `global_step` counts."""

from typing import Any


class Updates:
    """Counts the updates of a fit: a batch ends one if any optimizer has stepped in it.

    Lightning's `global_step` counts the steps of every optimizer. It grows by two where two step in each batch, and not at
    all in a batch whose gradients wait for the next one, by Lightning or by hand.

    Args:
        step: `global_step` before the fit.

    Attributes:
        step, before: `global_step` after the last batch, and before it.
        count: the updates that have ended.
        is_between: whether the next batch begins an update.
    """

    def __init__(self, step: int = 0):
        self.step = self.before = step
        self.count = 0
        self.is_between = True

    def end_batch(self, step: int) -> bool:
        """Count a batch that has ended, with `global_step` after it; whether it has ended an update."""
        self.before, self.step = self.step, step
        self.is_between = step != self.before
        self.count += self.is_between
        return self.is_between

    def has_passed(self, interval: int) -> bool:
        """Whether the last batch has reached or passed a multiple of so many steps."""
        return bool(passes(self.before, self.step, interval))


def passes(before: Any, after: Any, interval: int) -> Any:
    """Whether a multiple of an interval lies behind `before`, and not behind `after`; numbers, or arrays of them.

    A step that is a multiple itself may never come: of two optimizers, `global_step` may stay odd.
    """
    return before // interval != after // interval
