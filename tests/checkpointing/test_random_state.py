"""Random states are saved and restored exactly."""

import torch

from batchscope.checkpointing.random_state import random_state, restore_random_state


def test_random_states_are_put_back_as_they_were() -> None:
    import random

    import numpy

    saved = random_state()
    drawn = (torch.rand(3).tolist(), random.random(), numpy.random.random())
    restore_random_state(saved)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.random()) == drawn
