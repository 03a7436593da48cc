"""A node becomes the object that it describes: any class or function, nested or not; what fails is one line."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from batchscope.data.spec import DataSpec
from batchscope.errors import UserError
from batchscope.models import mlp
from batchscope.training.build import build, build_model
from tests.support.own_package import Write

SPEC = DataSpec(kind="image", input_shape=(1, 4, 4), target="class", num_outputs=2)
MLP = {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": [3]}
CHECKPOINTS = {"_target_": "batchscope.checkpointing.callback.Checkpoints"}
TRAINER = {"_target_": "lightning.Trainer", "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
LAYERS = [{"_target_": "torch.nn.Flatten"}, {"_target_": "torch.nn.Linear", "in_features": 16, "out_features": 2}]

OWN = """
import torch.nn
import torchvision
from torch import nn

class Sequence(nn.Sequential):
    def __init__(self, hidden=3):
        super().__init__(nn.Flatten(), nn.Linear(16, hidden))

class Recurrent(nn.LSTM):
    def __init__(self, spec):
        super().__init__(spec.input_shape[-1], 3)

class Residual(torchvision.models.ResNet):
    def __init__(self, **options):
        super().__init__(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], **options)

class Dotted(torch.nn.Module):
    def __init__(self, spec, encoder, sizes=(), parts=None):
        super().__init__()
        self.encoder, self.sizes, self.parts = encoder, sizes, parts

class Failing(nn.Module):
    def __init__(self):
        self.size = {}["size"]

class Leaving(nn.Module):
    def __init__(self):
        raise SystemExit("no such size")

def made(spec): return nn.Linear(16, spec.num_outputs)
"""
STAR = "from .net import *\nclass Star(Dotted): pass\n"
PASSES_ON = (
    "import mynet.net\nclass Passes(mynet.net.Dotted):\n    def __init__(self, **rest): super().__init__(**rest)\n"
)


@pytest.fixture
def own(package: Write) -> None:
    package(net=OWN, star=STAR, passes=PASSES_ON)


def model_of(target: str, **options: Any) -> nn.Module:
    data: Any = SimpleNamespace(spec=SPEC, name="toy")
    return build_model({"model": {"_target_": target, **options}}, data)


def refusal(target: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        model_of(target, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("torch.nn.Sequential", {"_args_": LAYERS}),
        ("mynet.net.Sequence", {"hidden": 5}),
        ("mynet.net.Recurrent", {}),
        ("mynet.net.Residual", {"num_classes": 2}),
        ("mynet.net.Dotted", {"encoder": LAYERS[1]}),
        ("mynet.star.Star", {"encoder": None}),
        ("mynet.passes.Passes", {"encoder": None}),
        ("mynet.net.made", {}),
        ("torchvision.models.resnet18", {"num_classes": 2}),
    ],
)
def test_any_class_or_function_that_makes_a_module_is_a_model(target: str, options: dict[str, Any], own: None) -> None:
    assert isinstance(model_of(target, **options), nn.Module)


def test_nodes_within_nodes_are_built_wherever_they_stand(own: None) -> None:
    loss = {"_target_": "torch.nn.CrossEntropyLoss", "_partial_": True}
    model: Any = model_of("mynet.net.Dotted", encoder=LAYERS[1], sizes=LAYERS, parts={"loss": loss, "width": [4, 5]})
    assert isinstance(model.encoder, nn.Linear)
    assert [type(layer) for layer in model.sizes] == [nn.Flatten, nn.Linear]
    assert isinstance(model.parts["loss"], partial)
    assert json.dumps(model.parts["width"]) == "[4, 5]"  # a plain list
    assert type(model.parts) is dict


def test_an_argument_is_passed_as_it_is_and_takes_the_place_of_an_option() -> None:
    assert isinstance(build(MLP, "model", spec=SPEC), mlp.MLP)
    assert build(CHECKPOINTS | {"dirpath": "a"}, "callbacks.checkpoint", dirpath="b").dirpath == "b"
    first = build(CHECKPOINTS, "callbacks.checkpoint")
    assert first in build(TRAINER, "trainer", callbacks=[first]).callbacks


@pytest.mark.parametrize(
    ("path", "target", "said"),
    [
        ("model", "torch.utils.data.DataLoader", "model: got a DataLoader, takes an nn.Module"),
        ("data", "torch.nn.Identity", "data: got an Identity, takes a LightningDataModule"),
        ("optimizer", "torch.nn.Identity", "optimizer: got an Identity, takes a torch.optim.Optimizer"),
        ("trainer", "torch.nn.Identity", "trainer: got an Identity, takes a lightning.Trainer"),
        ("callbacks.mine", "torch.nn.Identity", "callbacks.mine: got an Identity, takes a Callback of Lightning"),
        ("logger.mine", "torch.nn.Identity", "logger.mine: got an Identity, takes a Logger of Lightning"),
    ],
)  # fmt: skip
def test_an_object_of_another_kind_than_the_sections_is_told(path: str, target: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        build({"_target_": target, "dataset": [1]} if target.endswith("Loader") else {"_target_": target}, path)
    assert str(caught.value) == said


def test_what_a_constructor_raises_is_told_with_its_place(own: None) -> None:
    number = 1 + OWN.splitlines().index('        self.size = {}["size"]')
    assert refusal("mynet.net.Failing") == f"model: KeyError: 'size' (mynet/net.py, line {number})"
    assert refusal("mynet.net.Leaving").startswith("model: SystemExit: no such size (mynet/net.py, line ")
    nested = refusal("mynet.net.Dotted", encoder={"_target_": "mynet.net.Failing"})
    assert nested == f"model.encoder: KeyError: 'size' (mynet/net.py, line {number})"
    wrong = {"_target_": "torch.nn.Linear", "in_features": "x", "out_features": 2}
    assert refusal("torch.nn.Sequential", _args_=[wrong]).startswith("model._args_.0: ")
    assert refusal("mynet.net.Dotted").startswith("model: Dotted.__init__() missing 1 required positional argument")


def test_a_value_that_a_library_refuses_is_told_with_its_option() -> None:
    profiler = {"_target_": "lightning.pytorch.profilers.PyTorchProfiler", "sort_by_key": "name"}
    with pytest.raises(UserError, match=r"^trainer\.profiler: Found sort_by_key: name"):
        build(TRAINER | {"profiler": profiler}, "trainer")


def test_a_function_that_runs_commands_is_refused(own: None) -> None:
    for key, path in (("_target_", "model"), ("encoder", "model.encoder")):
        command = {"_target_": "os.system", "command": "touch ran"}
        node = {"_target_": "mynet.net.Dotted", key: command} if key == "encoder" else command
        said = refusal(node.pop("_target_"), **node)
        assert said.startswith(f"{path}: Target 'os.system' is blocklisted because it allows ") and "\n" not in said
        assert len(said.partition("because it allows ")[2].split()) > 3  # the whole of Hydra's sentence
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mynet.net.Missing", "AttributeError: module 'mynet.net' has no attribute 'Missing'"),
        ("mynet.net.Nett", "AttributeError: module 'mynet.net' has no attribute 'Nett'. Did you mean 'Net'?"),
        ("mynet.missing.Net", "AttributeError: module 'mynet' has no attribute 'missing'"),
        ("nowhere_at_all.Net", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("mynet.absent.Net", "ModuleNotFoundError: No module named 'nowhere_at_all' (mynet/absent.py, line 1)"),
        ("mynet.raises.Net", "ZeroDivisionError: division by zero (mynet/raises.py, line 2)"),
        ("mynet.leaves.Net", "SystemExit: 3 (mynet/leaves.py, line 1)"),
        ("mynet.broken.Net", "SyntaxError: '(' was never closed (broken.py, line 1)"),
    ],
)
def test_a_target_that_cannot_be_imported_is_told_with_its_place(target: str, said: str, package: Write) -> None:
    package(
        absent="import nowhere_at_all\n",
        raises="import torch\n1 / 0\n",
        leaves="raise SystemExit(3)\n",
        broken="def f(\n",
    )
    assert refusal(target) == f"model._target_: {target} cannot be imported: {said}"
    assert refusal("torch.nn.Sequential", _args_=[{"_target_": target}]).startswith(
        f"model._args_.0._target_: {target} "
    )


def test_the_current_folder_shadows_nothing_that_is_installed(package: Write) -> None:
    Path("json").mkdir()
    Path("json/__init__.py").write_text("raise ImportError")
    assert model_of("torch.nn.Identity")
    assert not Path(json.__file__).is_relative_to(Path.cwd())
    assert refusal("json.Missing").endswith("module 'json' has no attribute 'Missing'")


def test_a_value_in_place_of_the_augmentation_is_answered_with_its_options() -> None:
    with pytest.raises(UserError) as caught:
        build({"_target_": "batchscope.data.mnist.MNIST", "augment": 2}, "data")
    options = "data.augment.shift, data.augment.rotation, data.augment.crop, data.augment.flip"
    assert str(caught.value) == f"data.augment: got 2, takes null; its options are {options}"


def test_a_model_without_lengths_is_refused_for_sequences_of_different_lengths() -> None:
    spec = DataSpec("sequence", (9, 2), "class", 2, variable_length=True)
    with pytest.raises(UserError) as caught:
        build_model({"model": {"_target_": "torch.nn.Identity"}}, cast(Any, SimpleNamespace(spec=spec, name="own")))
    assert str(caught.value) == (
        "model: Identity reads sequences of one length: its forward takes no `lengths`, and those of own vary"
    )


def test_a_model_for_other_data_is_told(package: Write) -> None:
    package(net="from torch import nn\nclass Net(nn.Identity):\n    accepts = ('sequence',)\n")
    assert refusal("mynet.net.Net") == "model: Net reads sequence data, and toy has image data"
