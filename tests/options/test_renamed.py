"""An old name is answered with its new name in one line."""

import copy
from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.options import renamed
from batchscope.options.check import check_config
from batchscope.options.compose import check_command_line
from batchscope.options.explain import wrong_key
from batchscope.options.overrides import parse
from batchscope.options.renamed import OPTIONS, TARGETS, new_name
from batchscope.options.signatures import _locate as locate

OLD, NEW = "callbacks.pictures", "callbacks.prediction_images"


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        check_config(config)
    return str(caught.value)


@pytest.fixture
def config() -> dict[str, Any]:
    """The configuration of a run in which the pictures have their new name."""
    config = copy.deepcopy(check_command_line([], multirun=False)[0])
    pictures = config["callbacks"].pop("pictures", None) or config["callbacks"].pop("prediction_images")
    return {**config, "callbacks": {**config["callbacks"], "prediction_images": pictures}}


@pytest.mark.parametrize(
    ("name", "new"), [("a.b", "c"), ("a.b.x.y", "c.x.y"), ("a.bc", None), ("a", None), ("x.a.b", None)]
)
def test_an_old_name_stands_for_everything_below_it(name: str, new: str | None) -> None:
    assert new_name(name, {"a.b": "c"}) == new


@pytest.mark.parametrize("word", [f"{OLD}=null", f"~{OLD}", f"{OLD}.num_samples=3"])
def test_an_override_of_an_old_option_is_answered_with_the_new_one(word: str, config: dict[str, Any]) -> None:
    (override,) = parse([word])
    key = override.key_or_group
    assert str(wrong_key(config, override)) == f"{key}: is called {key.replace(OLD, NEW)} now"


@pytest.mark.parametrize("node", [None, {"num_samples": 3}])
def test_an_old_option_in_a_yaml_file_is_answered_with_the_new_one(node: Any, config: dict[str, Any]) -> None:
    config["callbacks"]["pictures"] = node
    assert refusal(config) == f"{OLD}: is called {NEW} now"


def test_a_callback_of_ones_own_may_have_an_old_name(config: dict[str, Any]) -> None:
    config["callbacks"]["pictures"] = {"_target_": "lightning.pytorch.callbacks.RichProgressBar"}
    check_config(config)


@pytest.mark.parametrize("option", ["optimized_metric", "callbacks.checkpoint.monitor"])
def test_an_old_metric_is_answered_with_the_new_one(option: str, config: dict[str, Any]) -> None:
    node = config if option == "optimized_metric" else config["callbacks"]["checkpoint"]
    node[option.rpartition(".")[2]] = "samples_per_sec_median"
    assert refusal(config) == f"{option}: samples_per_sec_median is called samples_per_sec now"


def test_no_old_name_is_in_use_and_every_new_one_is() -> None:
    for old, new in TARGETS.items():
        for name in ("Optimizer", "Checkpoints", "BatchSizeSearch", "DataSpec", "Task", None):
            assert locate(f"{old}.{name}" if name else old) is None
        assert locate(new) or any(
            locate(f"{new}.{name}") for name in ("Optimizer", "Checkpoints", "BatchSizeSearch", "DataSpec", "Task")
        )
    assert not {*OPTIONS.values()} & {*OPTIONS}
    assert not {*renamed.METRICS.values()} & {*renamed.METRICS}
