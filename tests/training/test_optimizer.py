"""Every optimizer and schedule, and the learning rate at another batch size."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscope.options.compose import check_command_line
from batchscope.options.groups import CONFIGS, choices_of, load
from batchscope.training.build import build_optimizer
from batchscope.training.optimizer import Optimizer
from tests.support.command_lines import composed, refusal


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", choices_of("optimizer"))
def test_every_optimizer_trains_under_every_schedule(name: str) -> None:
    options = load(CONFIGS / "_optimizer.yaml") | load(CONFIGS / "optimizer" / f"{name}.yaml")
    node = {key: value for key, value in options.items() if value is not None and key != "defaults"}
    assert node["_target_"].rpartition(".")[2].lower() == name
    for schedule in ("one_cycle", "constant", "cosine", "step"):
        model, recipe = layer(), build_optimizer({**node, "schedule": schedule})
        optimizer = recipe.build(model.parameters())
        assert (recipe.build_schedule(optimizer, 10) is None) == (schedule == "constant")
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        assert not same(list(model.parameters()), list(layer().parameters()))


def scheduled(steps: float = float("inf"), **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer and the schedule of its options."""
    recipe = Optimizer(torch.optim.SGD, **options)
    optimizer = recipe.build(layer().parameters())
    return optimizer, recipe.build_schedule(optimizer, steps)


NO_END = "needs an end: set trainer.max_steps, or trainer.max_epochs where the data's loader has a length"


@pytest.mark.parametrize(
    ("call", "options", "said"),
    [
        (Optimizer, {"lr": 0.001, "min_lr": 0.1}, "optimizer.min_lr: got 0.1, takes at most optimizer.lr, which is 0.001"),
        (Optimizer, {"make": partial(torch.optim.SGD, nesterov=True)}, "optimizer: ValueError: Nesterov momentum requires a momentum"),
        (Optimizer, {"make": partial(torch.optim.Adam, betas=(0.9,))}, "optimizer: IndexError: tuple index out of range"),
        (Optimizer, {"make": partial(torch.optim.SGD, momentum=0.9, fused=True)}, "optimizer.fused: SGD with a momentum may read"),
        (scheduled, {"schedule": "one_cycle"}, f"optimizer.schedule: one_cycle {NO_END}"),
        (scheduled, {"schedule": "cosine"}, f"optimizer.schedule: cosine {NO_END}"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_one_line(call: Callable, options: dict, said: str) -> None:
    assert refusal(call, **options).startswith(said)


# --- the learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_the_learning_rate_is_scaled_from_the_reference_batch_size(scaling: str, factor: int) -> None:
    recipe = Optimizer(lr=0.1, min_lr=0.01, schedule="cosine", lr_scaling=scaling, reference_batch_size=64)
    scaled = recipe.scaled_to(256)
    assert (scaled.lr, scaled.min_lr) == pytest.approx((0.1 * factor, 0.01 * factor))
    assert recipe.scaled_to(64).lr == recipe.lr == 0.1


class OwnSGD(torch.optim.SGD):
    """A subclass."""


@pytest.mark.parametrize(
    ("rule", "makes"),
    [
        ("linear", [torch.optim.SGD, torch.optim.ASGD, OwnSGD, partial(torch.optim.SGD, momentum=0.9)]),
        ("sqrt", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Rprop]),
    ],
)
def test_auto_is_the_rule_that_suits_the_optimizer(rule: str, makes: list[Callable]) -> None:
    assert [Optimizer(make, lr=0.1, lr_scaling="auto").rule for make in makes] == [rule] * len(makes)


def test_a_search_for_a_target_scales_the_rate_of_any_optimizer() -> None:
    nodes = [composed("experiment=time_to_target", "target=0.9", f"optimizer={name}") for name in ("sgd", "adamw")]
    assert [build_optimizer(node["optimizer"]).rule for node in nodes] == ["linear", "sqrt"]


@pytest.mark.parametrize("experiment", ["throughput", "find_batch_size", "diagnose"])
def test_a_change_of_the_batch_changes_no_rate_of_a_timed_run(experiment: str) -> None:
    (config,) = check_command_line([f"experiment={experiment}"], multirun=True)
    assert build_optimizer(config["optimizer"]).scaled_to(4096).lr == 1e-4


EXPERIMENTS = {file.stem: load(file) for file in sorted((CONFIGS / "experiment").glob("*.yaml"))}
WITH_BOTH = [
    name
    for name, config in EXPERIMENTS.items()
    if "lr" in config.get("optimizer", {}) and "batch_size" in config.get("data", {})
]


@pytest.mark.parametrize("name", WITH_BOTH)
def test_an_experiment_with_a_rate_and_a_batch_size_chose_the_rate_for_this_size(name: str) -> None:
    config = composed(f"experiment={name}", "optimizer.lr_scaling=auto")
    assert build_optimizer(config["optimizer"]).scaled_to(config["data"]["batch_size"]).lr == config["optimizer"]["lr"]


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("cosine", {"min_lr": 0.2}, [1, 0.883, 0.6, 0.317, 0.2]),
        ("step", {"step_epochs": 2, "factor": 0.5}, [1, 1, 0.5, 0.5, 0.25]),
        ("one_cycle", {"warmup": 0}, [0.854, 0.5, 0.146, 0]),
        ("one_cycle", {"warmup": 0.5}, [0.04, 1, 0.5, 0]),
        ("one_cycle", {"warmup": 1}, [0.04, 0.28, 0.76, 0]),
    ],
)
def test_a_schedule_has_these_rates(schedule: Any, options: dict[str, Any], expected: list[float]) -> None:
    optimizer, stepped = scheduled(4, lr=1.0, schedule=schedule, **options)
    for rate in expected:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-3)
        optimizer.step()
        stepped.step()


@pytest.mark.parametrize(("steps", "warmup", "rates"), [(1, 0.3, [1]), (2, 0.5, [1, 0])])
def test_a_cycle_of_few_steps_reaches_its_peak(steps: int, warmup: float, rates: list[float]) -> None:
    optimizer, stepped = scheduled(steps, lr=1.0, schedule="one_cycle", warmup=warmup)
    assert (stepped is None) == (steps == 1)
    for rate in rates:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-3)
        optimizer.step()
        if stepped is not None:
            stepped.step()


@pytest.mark.parametrize(
    ("given", "highest", "lowest"), [(0.9, 0.95, 0.85), (0.5, 0.55, 0.45), (0.98, 0.99, 0.93), (0.02, 0.07, 0.0)]
)
def test_one_cycle_moves_a_momentum_around_the_given_one(given: float, highest: float, lowest: float) -> None:
    betas = partial(torch.optim.AdamW, betas=(given, 0.99))
    for make in (partial(torch.optim.SGD, momentum=given), betas):
        recipe = Optimizer(make, lr=1.0, schedule="one_cycle", warmup=0.5)
        optimizer = recipe.build(layer().parameters())
        stepped, momenta = recipe.build_schedule(optimizer, 4), []
        for _ in range(4):
            (group,) = optimizer.param_groups
            momenta.append(group["betas"][0] if "betas" in group else group["momentum"])
            optimizer.step()
            stepped.step()
        assert (momenta[0], momenta[1]) == pytest.approx((highest, lowest))  # the rate peaks in the second step
        assert momenta[3] == pytest.approx(highest)


def test_one_cycle_gives_no_momentum_to_an_optimizer_of_none() -> None:
    optimizer, _ = scheduled(10, schedule="one_cycle")
    assert optimizer.param_groups[0]["momentum"] == 0
    assert not optimizer.state  # nor a buffer for it
