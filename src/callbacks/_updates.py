"""Updates: which batches end an update, and how many updates a fit has had, whatever Lightning's `global_step` counts."""

from typing import Any


class Updates:
    """Counts the updates of a fit: a batch ends an update if any optimizer has stepped in it.

    Lightning's `global_step` counts the steps of every optimizer. It grows by two where two optimizers step in each batch,
    and not at all in a batch whose gradients are accumulated, by Lightning or by hand.

    Args:
        step: `global_step` before the fit.

    Attributes:
        step, before: `global_step` after the last batch, and before that batch.
        count: the updates that have ended.
        is_between: whether the next batch begins an update.
    """

    def __init__(self, step: int = 0):
        self.step = self.before = step
        self.count = 0
        self.is_between = True

    def end_batch(self, step: int) -> bool:
        """Count a batch that has ended, given the `global_step` after it. Return whether it has ended an update."""
        self.before, self.step = self.step, step
        self.is_between = step != self.before
        self.count += self.is_between
        return self.is_between

    def has_passed(self, interval: int) -> bool:
        """Whether the last batch has reached or passed a multiple of `interval` steps."""
        return bool(crosses_multiple(self.before, self.step, interval))


def crosses_multiple(before: Any, after: Any, interval: int) -> Any:
    """Whether a multiple of an interval lies in (`before`, `after`]; the arguments are numbers or arrays.

    `global_step` may never be a multiple itself: with two optimizers it may stay odd.
    """
    return before // interval != after // interval
