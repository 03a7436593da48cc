"""The learning rate at another batch size than the one it was chosen for."""

import pytest

from batchscope.optimizer import SGD


@pytest.mark.parametrize(("scaling", "lr"), [("none", 0.1), ("sqrt", 0.2), ("linear", 0.4)])
def test_the_learning_rate_is_scaled_from_the_reference_batch_size(scaling, lr):
    recipe = SGD(lr=0.1, lr_scaling=scaling, reference_batch_size=64)
    assert recipe.scaled_to(256).lr == pytest.approx(lr)
    assert recipe.scaled_to(64).lr == 0.1
    assert recipe.lr == 0.1
