"""A node builds what its place is for, and has the options that its target takes."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from batchscope.errors import UserError
from batchscope.options import nodes
from batchscope.options.nodes import check_node
from batchscope.options.signatures import parameters_of


def message_of(call: Callable[..., None], *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.fixture
def thing(write: Callable[..., None]) -> str:
    write(
        one="""
        class Thing:
            def __init__(self, spec, batch_size: PositiveInt = 1, part=None, parts=()): pass
        """
    )
    return "toy.one.Thing"


def test_a_node_with_known_options_passes(thing: str) -> None:
    node = {"_target_": thing, "batch_size": 4}
    assert check_node(node, "data") is None


@pytest.mark.parametrize("value", [2, True, "shift", [2], {"shift": 2}])
def test_a_value_in_place_of_the_augmentation_is_answered_with_its_options(value: Any) -> None:
    node = {"_target_": "batchscope.data.mnist.MNIST", "augment": value}
    assert message_of(check_node, node, "data") == (
        f"data.augment: got {value!r}, takes null; its options are data.augment.shift, data.augment.rotation, "
        "data.augment.crop, data.augment.flip"
    )


def test_somebody_elses_option_of_the_name_augment_takes_anything(write: Callable[..., None]) -> None:
    write(one="class Other:\n    def __init__(self, augment=True): pass")
    assert check_node({"augment": False, "_target_": "toy.one.Other"}, "data") is None


def test_an_unknown_option_is_refused_with_the_nearest_and_those_that_there_are(thing: str) -> None:
    node = {"_target_": thing, "batch_size": 4, "batch_sise": 3}
    assert message_of(check_node, node, "data") == (
        "data.batch_sise: no such option. Did you mean 'batch_size'? data takes batch_size."
    )


def test_a_wrong_value_is_named_by_its_full_name(thing: str) -> None:
    node = {"_target_": thing, "part": {"_target_": thing, "parts": [{"_target_": thing, "batch_size": 0}]}}
    message = message_of(check_node, node, "data")
    assert message == "data.part.parts.0.batch_size: got 0, takes a whole number of at least 1."


def test_a_node_without_a_target_may_hold_anything_but_wrong_nodes(thing: str) -> None:
    check_node({"what": 1, "ever": None}, "callbacks")
    message = message_of(check_node, {"mine": {"_target_": thing, "x": 1}}, "callbacks")
    assert message.startswith("callbacks.mine.x: no such option.")


@pytest.mark.parametrize("key", ["_args_", "_partial_", "_recursive_", "_convert_", "_mine_"])
@pytest.mark.parametrize("value", [True, "all", [], [{"_target_": "torch.hub.load"}]], ids=str)
def test_of_hydras_keys_only_the_target_is_taken(key: str, value: Any, thing: str) -> None:
    for node in ({"_target_": thing, key: value}, {key: value}, {"_target_": thing, "parts": [[{"a": {key: value}}]]}):
        assert f"{key}: no such option" in message_of(check_node, node, "model")


HOSTILE = {"_target_": "torch.hub.load", "source": "local"}


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": HOSTILE},
        {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": [[HOSTILE]]},
        {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": {"a": {"": [HOSTILE]}}},
        {"a": {5: HOSTILE}},
        {"a": {None: {True: [{"": HOSTILE}]}}},
        [[[HOSTILE]]],
    ],
)
def test_a_hostile_target_is_refused_wherever_it_stands(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "check_value", lambda *_: None)  # which would refuse some of them for their kind
    assert "_target_: got 'torch.hub.load'" in message_of(check_node, node, "model")


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("model", "batchscope.data.mnist.MNIST"),
        ("model", "batchscope.training.optimizer.AdamW"),
        ("model", "batchscope.records.run_record.RunRecord"),
        ("data", "batchscope.models.mlp.MLP"),
        ("data", "lightning.LightningDataModule"),
        ("optimizer", "torch.optim.AdamW"),
        ("trainer", "lightning.pytorch.cli.LightningCLI"),
        ("trainer.strategy", "lightning.pytorch.profilers.PyTorchProfiler"),
        ("trainer.plugins", "lightning.pytorch.plugins.MixedPrecision"),
        ("trainer.plugins.0", "lightning.pytorch.plugins.MixedPrecision"),
        ("callbacks.mine", "lightning.pytorch.loggers.CSVLogger"),
        ("callbacks.mine", "lightning.pytorch.cli.LightningCLI"),
        ("callbacks.mine.inner", "lightning.pytorch.callbacks.EarlyStopping"),
        ("logger.mine", "lightning.pytorch.callbacks.EarlyStopping"),
        ("logger.mine", "lightning.pytorch.profilers.PyTorchProfiler"),
        ("search", "batchscope.models.mlp.MLP"),
        ("anything", "batchscope.models.mlp.MLP"),
    ],
)
def test_a_section_builds_one_kind_of_thing(path: str, target: str) -> None:
    assert message_of(check_node, {"_target_": target}, path).startswith(f"{path}._target_: got {target!r}, ")


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.open",
        "builtins.eval",
        "torch.load",
        "numpy.load",
        "shutil.rmtree",
        "subprocess.run",
        "batchscope.train.os.system",
        "batchscope.train.train",
        "lightning.fabric.utilities.cloud_io._load",
        "batchscope.cli.train.subprocess.run",
        "batchscope.data.torchvision_images.shutil.rmtree",
        "batchscope.data.torchvision_images.FileLock",
        "lightning.fabric.utilities.cloud_io.torch.load",
        "torch.optim.adamw.torch.load",
        "torch.optim",
        "batchscope.data.mnist.Missing",
        "batchscope.data.mnist.MNIST.load",
        "batchscope",
        "batchscope.",
        "batchscopes.evil.Thing",
        "",
        5,
        ["batchscope.data.mnist.MNIST"],
    ],
)
def test_a_target_that_could_run_somebody_elses_code_is_refused(target: Any) -> None:
    message = message_of(check_node, {"_target_": target, "x": 1}, "model")
    assert message == f"model._target_: got {target!r}, takes a Module class of batchscope"


def exported(module: str) -> list[str]:
    return [f"{module}.{name}" for name in importlib.import_module(module).__all__]


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("model", "batchscope.models.cnn.SimpleCNN"),
        ("data", "batchscope.data.sequential_mnist.SequentialMNIST"),
        ("optimizer", "batchscope.training.optimizer.SGD"),
        ("trainer", "lightning.Trainer"),
        ("trainer", "lightning.pytorch.Trainer"),
        ("search", "batchscope.sweep.search.BatchSizeSearch"),
        ("search", "batchscope.sweep.search.Diagnosis"),
        *(("callbacks.mine", name) for name in exported("lightning.pytorch.callbacks")),
        *(("logger.mine", name) for name in exported("lightning.pytorch.loggers")),
        *(("trainer.strategy", name) for name in exported("lightning.pytorch.strategies") if "Registry" not in name),
        *(("trainer.profiler", name) for name in exported("lightning.pytorch.profilers")),
    ],
)
def test_what_a_section_is_for_is_allowed(path: str, target: str) -> None:
    assert check_node({"_target_": target}, path) is None


@pytest.mark.parametrize(
    "annotation", ["timedelta", "Optional[nn.Module]", "'Quoted'", "Optional['Quoted']", "int + 1"]
)
def test_an_annotation_that_cannot_be_read_is_not_checked(annotation: str, write: Callable[..., None]) -> None:
    write(one=f"class Thing:\n    def __init__(self, size: {annotation}): pass")
    for value in (None, 1, "x", [1], {"a": 1}):
        check_node({"_target_": "toy.one.Thing", "size": value}, "thing")
    assert "size" in parameters_of("toy.one.Thing")
