"""Every optimizer and schedule, the learning rate at another batch size, and SGD's momentum where the first update is left out."""

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
from batchscope.training.optimizer import SGD, Adam
from tests.support.runs import EVERY_4, SMALL, assert_alike, kill_9, record, results, run

OUT = "hydra.run.dir=out"
STEP = "batchscope.training.task.Task.training_step"
SCHEDULES = ("one_cycle", "constant", "cosine", "step", "plateau")
# 40 steps in 4 epochs, in which the validation gets worse, so that plateau lowers the rate.
OVERFITS = ["trainer.max_epochs=4", "optimizer.lr=0.3", "optimizer.patience=0"]


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


@pytest.mark.parametrize("name", choices_of("optimizer"))
def test_every_optimizer_has_torchs_defaults_and_trains(name: str) -> None:
    node = check_command_line([f"optimizer={name}"], multirun=False)[0]["optimizer"]
    model, recipe = layer(), build(node, "optimizer")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = recipe.build(model.parameters())
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["lr"] == node["lr"]
    if name not in ("adamw", "sgd"):  # whose rates are those that this project's networks learn with
        theirs = type(optimizer)(layer().parameters()).param_groups[0]
        ours = optimizer.param_groups[0]
        assert {key: ours[key] for key in theirs if key not in ("params", "fused")} == {
            key: theirs[key] for key in theirs if key not in ("params", "fused")
        }
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    assert not same(list(model.parameters()), before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"betas": (0.9,)}, "optimizer.betas: got [0.9], takes a list of two numbers of at least 0 and below 1"),
        ({"betas": (0.9, 1)}, "optimizer.betas: got [0.9, 1], takes a list of two numbers of at least 0 and below 1"),
        ({"min_lr": 0.1}, "optimizer.min_lr: got 0.1, takes at most optimizer.lr, which is 0.001"),
        ({"schedule": "plateau", "factor": 1}, "optimizer.factor: got 1, and optimizer.schedule=plateau takes less"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(options: dict, said: str) -> None:
    with pytest.raises(UserError) as caught:
        Adam(**options)
    assert str(caught.value) == said


def test_plateau_needs_a_validation() -> None:
    with pytest.raises(UserError, match="^optimizer.schedule: plateau reads val/loss, and trainer.limit_val_batches=0"):
        check_command_line(["optimizer.schedule=plateau", "trainer.limit_val_batches=0"], multirun=False)


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine"])
def test_a_planned_schedule_needs_an_end(schedule: str) -> None:
    recipe = SGD(schedule=schedule)
    with pytest.raises(UserError, match=f"^optimizer.schedule: {schedule} needs an end: set trainer.max_epochs"):
        recipe.build_schedule(recipe.build(layer().parameters()), float("inf"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", choices_of("optimizer"))
def test_every_optimizer_goes_with_every_schedule(name: str, schedule: str) -> None:
    words = [f"optimizer={name}", f"optimizer.schedule={schedule}"]
    recipe = build(check_command_line(words, multirun=False)[0]["optimizer"], "optimizer")
    found = recipe.build_schedule(recipe.build(layer().parameters()), 10)
    assert (found is None) == (schedule == "constant")


def test_one_cycle_gives_no_momentum_to_an_optimizer_of_none() -> None:
    recipe = SGD(momentum=0.0)
    optimizer = recipe.build(layer().parameters())
    recipe.build_schedule(optimizer, 10)
    assert optimizer.param_groups[0]["momentum"] == 0


def rates(schedule: str, steps: int, **options: object) -> list[float]:
    recipe = SGD(lr=1.0, schedule=schedule, **options)
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


def test_the_lowest_rate_is_scaled_with_the_rate() -> None:
    scaled = SGD(lr=0.1, min_lr=0.01, schedule="cosine", lr_scaling="linear", reference_batch_size=64).scaled_to(128)
    assert (scaled.lr, scaled.min_lr) == pytest.approx((0.2, 0.02))


def last_rate(run_dir: Path) -> float:
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint["optimizer_states"][0]["param_groups"][0]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_every_schedule_is_resumed_bit_for_bit(schedule: str, tmp_path: Path) -> None:
    words = [*SMALL, *OVERFITS, EVERY_4, f"optimizer.schedule={schedule}", OUT]
    for number, at in ((0, None), (1, 15), (2, 21)):  # in an epoch, and after the last batch of one
        faults = [] if at is None else [(STEP, at, kill_9)]
        assert run(tmp_path / str(number), *words, faults=faults).end() == (-9 if faults else 0)
    for number in (1, 2):
        done = run(tmp_path / str(number), "resume=out")
        assert done.end() == 0, done.complained
        assert_alike(results(tmp_path / str(number) / "out"), results(tmp_path / "0" / "out"))


def test_plateau_lowers_the_rate_when_the_validation_gets_no_better(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, *OVERFITS, "optimizer.schedule=plateau", OUT)
    assert done.end() == 0, done.complained
    assert last_rate(tmp_path / "out") < 0.2
    assert record(tmp_path / "out")["learning_rate"] == 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in choices_of("optimizer") if one not in ("adamw", "sgd")])
def test_every_optimizer_is_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    words = [*SMALL, EVERY_4, f"optimizer={name}", OUT]
    assert run(tmp_path / "whole", *words).end() == 0
    assert run(tmp_path / "killed", *words, faults=[(STEP, 15, kill_9)]).end() == -9
    done = run(tmp_path / "killed", "resume=out")
    assert done.end() == 0, done.complained
    assert_alike(results(tmp_path / "killed" / "out"), results(tmp_path / "whole" / "out"))
