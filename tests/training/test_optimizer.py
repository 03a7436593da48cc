"""The learning rate at another batch size, and SGD's momentum where the first update is left out."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from batchscope.training.optimizer import SGD


@pytest.mark.parametrize(("scaling", "lr"), [("none", 0.1), ("sqrt", 0.2), ("linear", 0.4)])
def test_the_learning_rate_is_scaled_from_the_reference_batch_size(scaling, lr):
    recipe = SGD(lr=0.1, lr_scaling=scaling, reference_batch_size=64)
    assert recipe.scaled_to(256).lr == pytest.approx(lr)
    assert recipe.scaled_to(64).lr == 0.1
    assert recipe.lr == 0.1


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN, instead of whatever was there before."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, skipped: tuple[int, ...] = ()
) -> list[Tensor]:
    """The weights after some steps; in the skipped ones the kernel leaves the update out, as a scaler's overflow has it."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(step in skipped))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def torchs_own(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_momentum_survives_a_first_update_that_is_left_out(poisoned: None) -> None:
    model = layer()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = SGD().build(model.parameters())
    assert same(train(model, optimizer, 1, skipped=(0,)), before)
    assert all(torch.equal(s["momentum_buffer"], torch.zeros_like(p)) for p, s in optimizer.state.items())
    assert all(weights.isfinite().all() for weights in train(model, optimizer, 3))


def test_sgd_trains_bit_for_bit_as_torchs_own(poisoned: None) -> None:
    ours, theirs = layer(), layer()
    assert same(train(ours, SGD().build(ours.parameters()), 5), train(theirs, torchs_own(theirs), 5))


def test_loaded_momentum_goes_on(poisoned: None) -> None:
    whole, resumed = layer(), layer()
    optimizer = SGD().build(whole.parameters())
    train(whole, optimizer, 3)
    again = SGD().build(resumed.parameters())
    resumed.load_state_dict(whole.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading shares the tensors
    assert same(train(resumed, again, 3), train(whole, optimizer, 3))


def test_a_checkpoint_without_momentum_is_completed(poisoned: None) -> None:
    model = layer()
    optimizer = SGD().build(model.parameters())
    optimizer.load_state_dict(torchs_own(layer()).state_dict())  # saved before its first step
    assert all(weights.isfinite().all() for weights in train(model, optimizer, 3, skipped=(0,)))


def test_without_momentum_no_buffer_is_held() -> None:
    assert not SGD(momentum=0.0).build(layer().parameters()).state
