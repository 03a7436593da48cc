"""Every option of a choice in configs/ changes what is built from it, or is refused: none is accepted without effect.

The Trainer and the loggers are Lightning's, which gets their options as they are.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchscope.data.spec import DataSpec
from batchscope.errors import UserError
from batchscope.options.groups import CONFIGS, choices_of, load
from batchscope.options.purpose import annotation_of
from batchscope.options.values import choices_in
from batchscope.training.build import build_all, build_data, build_model, build_optimizer, lightning_module
from tests.support.command_lines import composed

SPEC = DataSpec("image", (1, 28, 28), "class", 10)
# Values of the options for which `other_value` cannot make one.
OTHERS = {
    "callbacks.early_stopping.mode": "max",
    "model.image_size": "40",
    "model.kernel_size": "5",
    "model.name": "mnasnet0_5",
    "model.weights": "NONE",
    "optimizer.min_lr": "0.001",
    "task.freeze": "['*.bias']",
    "task.loss": "{_target_:torch.nn.MultiMarginLoss}",
    "task.metrics": "{mean:{_target_:torchmetrics.MeanMetric}}",
}
CLOCKS = {"_began", "_drawn"}  # attributes that hold the time of construction


def other_value(option: str, value: Any, target: str) -> str:
    """Return another value of an option of a class, as a command line spells it."""
    choices = [choice for choice in choices_in(annotation_of(option, target)) if choice != value]
    if option in OTHERS:
        return OTHERS[option]
    if isinstance(value, bool):
        return str(not value).lower()
    if choices:
        return str(choices[0])
    if isinstance(value, list):
        first, *rest = value
        return f"[{','.join([other_value(f'{option}.0', first, target), *map(str, rest)])}]"
    if isinstance(value, float):
        return str(value / 2 or 0.25)
    return {int: lambda: str(value + 1), type(None): lambda: "3", str: lambda: f"{value}x"}[type(value)]()


def options(node: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Every option at and below a node, with another value; a node that is null has none."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from options(value, f"{path}.{key}")
        elif "_target_" in node and key != "_target_":
            yield f"{path}.{key}", other_value(f"{path}.{key}", value, node["_target_"])


def state(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Reduce an object to nested plain values."""
    if value is None or isinstance(value, bool | int | float | str | Path | type):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return [list(value.shape), value.requires_grad, value.detach().sum().item()]
    if id(value) in above:
        return "…"
    inner: Any = vars(value) if hasattr(value, "__dict__") else {}
    if isinstance(value, FunctionType):
        inner = [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, dict | list | tuple | set | frozenset):
        inner = value
    above = (*above, id(value))
    if isinstance(inner, dict):
        parts = {str(key): part for key, part in inner.items() if key not in CLOCKS}
        return [type(value).__name__, {key: state(part, above) for key, part in parts.items()}]
    return [type(value).__name__, [state(part, above) for part in inner]]


def rates(config: dict[str, Any]) -> list[Any]:
    """The options of an optimizer's parameter groups over ten steps of 256 samples."""
    recipe = build_optimizer(config["optimizer"]).scaled_to(256)
    optimizer = recipe.build(nn.Linear(5, 3).parameters())
    schedule, log = recipe.build_schedule(optimizer, 10), []
    for _ in range(10):
        log.append([{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return log


def task(config: dict[str, Any]) -> Any:
    network, data = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), SimpleNamespace(spec=SPEC, name="toy")
    module: Any = lightning_module(network, data, config, {"choices": {}, "dataset": "toy"})
    return module.measured, module.loss_function, network


BUILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "callbacks": lambda config: build_all(config["callbacks"], "callbacks"),
    "data": build_data,
    "model": lambda config: build_model(config, SimpleNamespace(spec=SPEC, name="toy")),
    "optimizer": rates,
    "task": task,
}
OF_SCHEDULES = {f"optimizer.{name}" for name in ("factor", "step_epochs", "min_lr", "reference_batch_size")}
OF_IMAGES = {f"data.augment.{name}" for name in ("shift", "rotation", "crop", "flip")}
# Options of the class that holds every optimizer of torch: tested with one optimizer.
OF_EVERY = {f"optimizer.{name}" for name in load(CONFIGS / "_optimizer.yaml")}
# Options that all datasets inherit: tested with one dataset without image options, and with one that has them.
OF_ALL_DATA = OF_IMAGES | {"data.batch_size", "data.num_workers", "data.seed", "data.pipeline"}
WHOLE_DATA = ("data=mnist", "data=adding")
# Further options of a choice whose default takes long to build.
BEGUN = {"model=torchvision": ["model.name=squeezenet1_1"]}
# The options that are refused while all others have their defaults.
REFUSED = {
    "optimizer": OF_SCHEDULES,
    "data": {"data.num_workers"},
    **{f"data={name}": {"data.num_workers", *OF_IMAGES} for name in ("adding", "copy_memory", "sequential_mnist")},
    "model=torchvision": {"model.weights"},  # which are downloaded
}
# With what these are read.
READ = {
    "optimizer.schedule=step": {"optimizer.factor", "optimizer.step_epochs"},
    "optimizer.schedule=cosine": {"optimizer.min_lr"},
    "optimizer.lr_scaling=linear": {"optimizer.reference_batch_size"},
    "data.pipeline=workers": {"data.num_workers"},
}


def composed_with(*words: str) -> dict[str, Any]:
    return composed("model=lstm_cell", *words)  # which reads images and sequences


def built(group: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return state(BUILT[group](config))


def effects(group: str, word: str, is_asked: Callable[[str], bool]) -> dict[str, bool | None]:
    """Whether another value of each asked option of a group changes what is built; None: it is refused."""
    words = [word, *BEGUN.get(word, [])]
    config = composed_with(*words)
    before = built(group, config)
    assert built(group, config) == before  # the same options build the same
    changes: dict[str, bool | None] = {}
    for option, value in options(config[group], group):
        if is_asked(option):
            try:
                changes[option] = built(group, composed_with(*words, f"{option}={value}")) != before
            except UserError:
                changes[option] = None
    return changes


# Without the default callbacks, each of which callbacks=default tests.
WORDS = {"callbacks": "callbacks=[none,{}]"}
CASES = [WORDS.get(group, f"{group}={{}}").format(choice) for group in BUILT for choice in choices_of(group)]


# The default tests have one optimizer with betas, and one with momentum.
SLOW = {f"optimizer={name}" for name in choices_of("optimizer")} - {"optimizer=adamw", "optimizer=sgd"}


@pytest.mark.parametrize("word", [pytest.param(word, marks=[pytest.mark.slow] * (word in SLOW)) for word in CASES])
def test_every_option_changes_what_is_built_or_is_refused(word: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    group = word.partition("=")[0]
    exempt = OF_EVERY if group == "optimizer" and word != "optimizer=adamw" else set()
    exempt |= OF_ALL_DATA if group == "data" and word not in WHOLE_DATA else set()
    changes = effects(group, word, lambda option: option not in exempt)
    assert [option for option, has_effect in changes.items() if has_effect is False] == []
    refused = {option for option, has_effect in changes.items() if has_effect is None}
    assert refused == REFUSED.get(word, REFUSED.get(group, set())) - exempt


ABOVE = (CONFIGS / "task" / "default.yaml").read_text(encoding="utf-8").partition("\n")[0]
PAGE = (CONFIGS.parent / "docs" / "commands.md").read_text(encoding="utf-8")
EXAMPLES = [ABOVE.partition("train.py ")[2], *re.findall(r"`([^`]*\btask\.(?!_target_)[^`]+)`", PAGE)]


@pytest.mark.parametrize("words", EXAMPLES)
def test_an_option_of_the_task_that_is_shown_fits_network_and_data(words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = composed(*shlex.split(words))
    data = build_data(config)
    lightning_module(build_model(config, data), data, config, {"choices": {}, "dataset": "toy"})


@pytest.mark.parametrize("word", READ)
def test_what_is_refused_has_an_effect_where_it_is_read(word: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert effects(word.partition(".")[0], word, READ[word].__contains__) == dict.fromkeys(READ[word], True)
