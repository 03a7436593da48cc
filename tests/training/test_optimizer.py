"""Every optimizer and schedule, the learning rate at another batch size, and SGD's momentum where an update is left out."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.options.groups import choices_of
from batchscope.training.build import build
from batchscope.training.optimizer import Optimizer
from tests.checkpointing.support import OUT
from tests.checkpointing.test_exact_resume import OVERFITS
from tests.support.runs import SMALL, last, record, run

SCHEDULES = ("one_cycle", "constant", "cosine", "step", "plateau")


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def composed(*words: str) -> dict:
    return check_command_line(list(words), multirun=False)[0]["optimizer"]


@pytest.mark.parametrize("name", choices_of("optimizer"))
def test_every_optimizer_has_torchs_defaults_and_trains_under_every_schedule(name: str) -> None:
    node = composed(f"optimizer={name}")
    model, recipe = layer(), build(node, "optimizer")
    assert {**vars(recipe), "options": None} == {**vars(Optimizer(name)), "options": None}
    assert recipe.options == Optimizer(name).options  # the YAML shows what the constructor has
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = recipe.build(model.parameters())
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["lr"] == node["lr"]
    if name not in ("adamw", "sgd"):  # whose rates are those that this project's networks learn with
        theirs, ours = type(optimizer)(layer().parameters()).param_groups[0], optimizer.param_groups[0]
        assert {k: ours[k] for k in theirs if k not in ("params", "fused")} == {
            k: theirs[k] for k in theirs if k not in ("params", "fused")
        }
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    assert not same(list(model.parameters()), before)
    for schedule in SCHEDULES:
        recipe = Optimizer(name, schedule=schedule)
        found = recipe.build_schedule(recipe.build(layer().parameters()), 10)
        assert (found is None) == (schedule == "constant")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"betas": (0.9,)}, "optimizer.betas: got [0.9], takes a list of two numbers of at least 0 and below 1"),
        ({"betas": (0.9, 1)}, "optimizer.betas: got [0.9, 1], takes a list of two numbers of at least 0 and below 1"),
        ({"lr": 0.001, "min_lr": 0.1}, "optimizer.min_lr: got 0.1, takes at most optimizer.lr, which is 0.001"),
        ({"schedule": "plateau", "factor": 1}, "optimizer.factor: got 1, and optimizer.schedule=plateau takes less"),
        (
            {"name": "sgd", "eps": 1e-8},
            "optimizer.eps: got 1e-08, and sgd takes lr, momentum, weight_decay; write optimizer=sgd",
        ),
    ],
)
def test_options_that_do_not_go_together_are_one_line(options: dict, said: str) -> None:
    with pytest.raises(UserError) as caught:
        Optimizer(**options)
    assert str(caught.value) == said


def test_plateau_needs_a_validation() -> None:
    with pytest.raises(UserError, match="^optimizer.schedule: plateau reads val/loss, and trainer.limit_val_batches=0"):
        composed("optimizer.schedule=plateau", "trainer.limit_val_batches=0")


# --- the learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_the_learning_rate_is_scaled_from_the_reference_batch_size(scaling: str, factor: int) -> None:
    recipe = Optimizer("sgd", lr=0.1, min_lr=0.01, schedule="cosine", lr_scaling=scaling, reference_batch_size=64)
    scaled = recipe.scaled_to(256)
    assert (scaled.lr, scaled.min_lr) == pytest.approx((0.1 * factor, 0.01 * factor))
    assert recipe.scaled_to(64).lr == recipe.lr == 0.1


def rates(schedule: str, steps: int, **options: float) -> list[float]:
    recipe = Optimizer("sgd", lr=1.0, schedule=schedule, **options)
    optimizer = recipe.build(layer().parameters())
    schedule = recipe.build_schedule(optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*found, optimizer.param_groups[0]["lr"]]


def test_cosine_falls_from_lr_to_min_lr() -> None:
    assert rates("cosine", 4, min_lr=0.2) == pytest.approx([1, 0.883, 0.6, 0.317, 0.2], abs=1e-3)


def test_step_multiplies_the_rate_after_every_so_many_epochs() -> None:
    assert rates("step", 4, step_epochs=2, factor=0.5) == [1, 1, 0.5, 0.5, 0.25]


def test_plateau_lowers_the_rate_when_the_validation_gets_no_better(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, *OVERFITS, "optimizer.schedule=plateau", OUT)
    assert done.end() == 0, done.complained
    assert last(tmp_path / "out")["optimizer_states"][0]["param_groups"][0]["lr"] < 0.2
    assert record(tmp_path / "out")["learning_rate"] == 0.3


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine"])
def test_a_planned_schedule_needs_an_end(schedule: str) -> None:
    recipe = Optimizer("sgd", schedule=schedule)
    with pytest.raises(UserError, match=f"^optimizer.schedule: {schedule} needs an end: set trainer.max_epochs"):
        recipe.build_schedule(recipe.build(layer().parameters()), float("inf"))


def test_one_cycle_gives_no_momentum_to_an_optimizer_of_none() -> None:
    recipe = Optimizer("sgd", momentum=0.0)
    optimizer = recipe.build(layer().parameters())
    recipe.build_schedule(optimizer, 10)
    assert optimizer.param_groups[0]["momentum"] == 0
    assert not optimizer.state  # nor a buffer for it


# --- SGD's momentum ---------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN, instead of whatever was there before."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return Optimizer("sgd").build(model.parameters())


def torchs_own(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)


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


def test_momentum_survives_a_first_update_that_is_left_out(poisoned: None) -> None:
    model = layer()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = sgd(model)
    assert same(train(model, optimizer, 1, skipped=(0,)), before)
    assert all(torch.equal(s["momentum_buffer"], torch.zeros_like(p)) for p, s in optimizer.state.items())
    assert all(weights.isfinite().all() for weights in train(model, optimizer, 3))


def test_sgd_trains_bit_for_bit_as_torchs_own_also_from_loaded_momentum(poisoned: None) -> None:
    ours, theirs, resumed = layer(), layer(), layer()
    optimizer = sgd(ours)
    assert same(train(ours, optimizer, 3), train(theirs, torchs_own(theirs), 3))
    again = sgd(resumed)
    resumed.load_state_dict(ours.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading shares the tensors
    assert same(train(resumed, again, 3), train(ours, optimizer, 3))


def test_a_checkpoint_without_momentum_is_completed(poisoned: None) -> None:
    model = layer()
    optimizer = sgd(model)
    optimizer.load_state_dict(torchs_own(layer()).state_dict())  # saved before its first step
    assert all(weights.isfinite().all() for weights in train(model, optimizer, 3, skipped=(0,)))
