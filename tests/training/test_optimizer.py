"""Every optimizer and schedule, the learning rate at another batch size, and SGD's momentum where an update is left out."""

import copy
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.options.groups import choices_of
from batchscope.training.optimizer import Optimizer
from tests.checkpointing.support import OUT
from tests.checkpointing.test_exact_resume import OVERFITS
from tests.support.recipes import sgd
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
def test_every_optimizer_trains_under_every_schedule(name: str) -> None:
    options = {key: value for key, value in composed(f"optimizer={name}").items() if value is not None}
    target = getattr(torch.optim, options.pop("_target_").rpartition(".")[2])
    assert target.__name__.lower() == name
    of_schedule = {key: options.pop(key) for key in [*options] if key in inspect.signature(Optimizer).parameters}
    for schedule in SCHEDULES:
        model, recipe = layer(), Optimizer(partial(target, **options), **{**of_schedule, "schedule": schedule})
        assert recipe.elementwise
        optimizer = recipe.build(model.parameters())
        found = recipe.build_schedule(optimizer, 10)
        assert (found is None) == (schedule == "constant")
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        assert not same(list(model.parameters()), list(layer().parameters()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 0.001, "min_lr": 0.1}, "optimizer.min_lr: got 0.1, takes at most optimizer.lr, which is 0.001"),
        ({"schedule": "plateau", "factor": 1}, "optimizer.factor: got 1, and optimizer.schedule=plateau takes less"),
        (
            {"make": partial(torch.optim.SGD, nesterov=True)},
            "optimizer: ValueError: Nesterov momentum requires a momentum and zero dampening",
        ),
        ({"make": partial(torch.optim.Adam, betas=(0.9,))}, "optimizer: IndexError: tuple index out of range"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(options: dict, said: str) -> None:
    with pytest.raises(UserError) as caught:
        Optimizer(**options)
    assert str(caught.value).startswith(said)


def test_plateau_needs_a_validation() -> None:
    with pytest.raises(UserError, match="^optimizer.schedule: plateau reads val/loss, and trainer.limit_val_batches=0"):
        composed("optimizer.schedule=plateau", "trainer.limit_val_batches=0")


# --- the learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_the_learning_rate_is_scaled_from_the_reference_batch_size(scaling: str, factor: int) -> None:
    recipe = Optimizer(lr=0.1, min_lr=0.01, schedule="cosine", lr_scaling=scaling, reference_batch_size=64)
    scaled = recipe.scaled_to(256)
    assert (scaled.lr, scaled.min_lr) == pytest.approx((0.1 * factor, 0.01 * factor))
    assert recipe.scaled_to(64).lr == recipe.lr == 0.1


def rates(schedule: str, steps: int, **options: float) -> list[float]:
    recipe = Optimizer(torch.optim.SGD, lr=1.0, schedule=schedule, **options)
    optimizer = recipe.build(layer().parameters())
    schedule = recipe.build_schedule(optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*found, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(("warmup", "peak_at"), [(0, 0), (0.25, 0), (0.5, 1), (1, 3)])
def test_one_cycle_rises_for_any_fraction_of_the_steps(warmup: float, peak_at: int) -> None:
    updates = rates("one_cycle", 4, warmup=warmup)[:4]
    assert updates.index(max(updates)) == peak_at
    assert updates[-1] < 1e-3 or warmup == 1


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
    recipe = Optimizer(schedule=schedule)
    with pytest.raises(UserError, match=f"^optimizer.schedule: {schedule} needs an end: set trainer.max_steps"):
        recipe.build_schedule(recipe.build(layer().parameters()), float("inf"))


def test_one_cycle_gives_no_momentum_to_an_optimizer_of_none() -> None:
    recipe = Optimizer(torch.optim.SGD, schedule="one_cycle")
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


def torchs_own(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)


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
    optimizer = sgd().build(model.parameters())
    assert same(train(model, optimizer, 1, skipped=(0,)), before)
    assert all(torch.equal(s["momentum_buffer"], torch.zeros_like(p)) for p, s in optimizer.state.items())
    assert all(weights.isfinite().all() for weights in train(model, optimizer, 3))


def test_sgd_trains_bit_for_bit_as_torchs_own_also_from_loaded_momentum(poisoned: None) -> None:
    ours, theirs, resumed = layer(), layer(), layer()
    optimizer = sgd().build(ours.parameters())
    assert same(train(ours, optimizer, 3), train(theirs, torchs_own(theirs), 3))
    again = sgd().build(resumed.parameters())
    resumed.load_state_dict(ours.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading shares the tensors
    assert same(train(resumed, again, 3), train(ours, optimizer, 3))


def test_a_checkpoint_without_momentum_is_completed(poisoned: None) -> None:
    model = layer()
    optimizer = sgd().build(model.parameters())
    optimizer.load_state_dict(torchs_own(layer()).state_dict())  # saved before its first step
    assert all(weights.isfinite().all() for weights in train(model, optimizer, 3, skipped=(0,)))
