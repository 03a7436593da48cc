"""Updates are counted by the batches in which an optimizer stepped, and steps by the multiples that they pass."""

import numpy
import pytest
import torch

from batchscope.callbacks._updates import Updates, crosses_multiple
from batchscope.callbacks.curves import TrainCurves
from tests.callbacks.support import monitoring
from tests.support.third_party_modules import Memory, Stranger, train

# `global_step` after each batch → the updates, and the batches that pass a multiple of 2 and of 3.
STEPS = {
    "one optimizer": ([1, 2, 3, 4], 4, [2, 4], [3]),
    "accumulated": ([0, 1, 1, 2], 2, [4], []),
    "two optimizers": ([2, 4, 6, 8], 4, [1, 2, 3, 4], [2, 3]),
    "odd": ([1, 3, 5, 7], 4, [2, 3, 4], [2, 4]),
}


@pytest.mark.parametrize("name", STEPS)
def test_updates_and_passed_multiples(name: str) -> None:
    steps, count, twos, threes = STEPS[name]
    updates, passed = Updates(), {2: [], 3: []}
    for batch, step in enumerate(steps, 1):
        updates.end_batch(step)
        for interval, batches in passed.items():
            batches += [batch] * updates.has_passed(interval)
    assert (updates.count, passed) == (count, {2: twos, 3: threes})
    assert numpy.flatnonzero(crosses_multiple(numpy.array([0, *steps[:-1]]), numpy.array(steps), 2)).tolist() == [
        n - 1 for n in twos
    ]


class Odd(Stranger):
    """Steps one optimizer in its first batch, and two in each of the others."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 if self.global_step == 0 else 2]:
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([parameter], lr=0.01) for parameter in self.parameters()]


def test_every_second_step_is_logged_where_all_of_them_are_odd() -> None:
    monitor = monitoring(every_n_steps=2, warmup_steps=1)
    train(Odd(), TrainCurves(2), monitor, logger=(memory := Memory()))
    assert memory.steps("train/loss") == memory.steps("time/step_ms") == [*range(3, 20, 2)]
