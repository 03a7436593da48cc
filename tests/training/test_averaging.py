"""Averaged weights: in a short training too, the average holds what was learned."""

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel

from batchscope.training.averaging import WeightAveraging
from tests.support.command_lines import composed, refusal


def averaged(updates: int, decay: float) -> float:
    """The average of a weight that is 0 at the first update and 1 at all later ones."""
    model = nn.Linear(1, 1, bias=False)
    average = AveragedModel(model, **WeightAveraging(decay)._kwargs)
    for update in range(updates):
        nn.init.constant_(model.weight, float(update > 0))
        average.update_parameters(model)
    return average.module.weight.item()


@pytest.mark.parametrize("updates", [54, 100, 860])
def test_the_first_weights_are_a_hundredth_of_an_average_at_most(updates: int) -> None:
    assert averaged(updates, 0.999) > 0.99


def test_later_the_decay_is_the_one_that_is_asked_for() -> None:
    # d = 1/2 after the first ten updates: each later update halves the share of the first weights.
    assert 1 - averaged(21, 0.5) == pytest.approx((1 - averaged(20, 0.5)) / 2, rel=1e-3)


def test_a_decay_is_a_fraction() -> None:
    message = refusal(composed, "callbacks=weight_averaging", "callbacks.weight_averaging.decay=1.5")
    assert message.startswith("callbacks.weight_averaging.decay: got 1.5, takes a number")
