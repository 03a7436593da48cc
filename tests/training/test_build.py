"""A config node builds the object that it describes: any class or function, nested too; what fails is one line."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from batchscope.checkpointing.checkpoint_file import AtomicCheckpointIO
from batchscope.data.adding import Adding
from batchscope.data.plain import PlainData
from batchscope.data.spec import DataSpec
from batchscope.errors import Interrupted
from batchscope.models import mlp
from batchscope.training.build import build, build_model, build_trainer, loader_switches, run_name
from tests.support.command_lines import refusal
from tests.support.own_data import Plain
from tests.support.own_package import Write

SPEC = DataSpec(kind="image", input_shape=(1, 4, 4), target="class", num_outputs=2)
TRAINER = {"_target_": "lightning.Trainer", "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
PLUGINS = "lightning.pytorch.plugins"
LAYERS = [{"_target_": "torch.nn.Flatten"}, {"_target_": "torch.nn.Linear", "in_features": 16, "out_features": 2}]
MODULES = {
    "net": """
from batchscope.errors import Interrupted
from torch import nn

class Net(nn.Module):
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
def stopped(): raise Interrupted(15)
""",
    "stopped": "from batchscope.errors import Interrupted\n\nraise Interrupted(15)\n",
    "absent": "import nowhere_at_all\n",
    "raises": "import torch\n1 / 0\n",
    "leaves": "raise SystemExit(3)\n",
    "broken": "def f(\n",
}
LINE = 1 + MODULES["net"].splitlines().index('        self.size = {}["size"]')


@pytest.fixture(autouse=True)
def own(package: Write) -> None:
    package(**MODULES)


def model_of(target: str, **options: Any) -> nn.Module:
    return build_model({"model": {"_target_": target, **options}}, SimpleNamespace(spec=SPEC, name="toy"))


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("torch.nn.Sequential", {"_args_": LAYERS}),
        ("mynet.net.made", {}),
        ("torchvision.models.resnet18", {"num_classes": 2}),
    ],
)
def test_any_class_or_function_that_makes_a_module_is_a_model(target: str, options: dict[str, Any]) -> None:
    assert isinstance(model_of(target, **options), nn.Module)


def test_nodes_within_nodes_are_built_wherever_they_stand() -> None:
    loss = {"_target_": "torch.nn.CrossEntropyLoss", "_partial_": True}
    model: Any = model_of("mynet.net.Net", encoder=LAYERS[1], sizes=LAYERS, parts={"loss": loss, "width": [4, 5]})
    assert isinstance(model.encoder, nn.Linear)
    assert [type(layer) for layer in model.sizes] == [nn.Flatten, nn.Linear]
    assert isinstance(model.parts["loss"], partial)
    assert json.dumps(model.parts["width"]) == "[4, 5]"  # a plain list
    assert type(model.parts) is dict


def test_an_argument_is_passed_as_it_is_and_takes_the_place_of_an_option() -> None:
    node = {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": [3]}
    assert isinstance(build(node, "model", spec=SPEC), mlp.MLP)
    checkpoints = {"_target_": "batchscope.checkpointing.callback.Checkpoints", "monitor": "a"}
    first = build(checkpoints, "callbacks.checkpoint", monitor="b")
    assert first.monitor == "b"
    assert first in build(TRAINER, "trainer", callbacks=[first]).callbacks


def test_the_current_folder_shadows_nothing_that_is_installed() -> None:
    Path("json").mkdir()
    Path("json/__init__.py").write_text("raise ImportError")
    assert model_of("torch.nn.Identity")
    assert not Path(json.__file__).is_relative_to(Path.cwd())


def test_the_plugins_of_a_trainer_stand_beside_the_one_for_checkpoints() -> None:
    def built(plugins: Any) -> Any:
        return build_trainer({"trainer": TRAINER | {"plugins": plugins}, "data": {}}, Path("out"), []).strategy

    environment, io = f"{PLUGINS}.environments.LightningEnvironment", f"{PLUGINS}.io.TorchCheckpointIO"
    for plugins in (None, {"_target_": environment}, [{"_target_": environment}]):
        assert isinstance(built(plugins).checkpoint_io, AtomicCheckpointIO)
    assert refusal(built, [{"_target_": io}]).startswith("trainer: Received multiple values for CheckpointIO")


@pytest.mark.parametrize(("asked", "own", "plain"), [(None, False, True), (False, False, False), (True, True, True)])
def test_lightnings_sampler_is_for_plain_data_unless_an_option_says_it(asked, own, plain) -> None:
    config = {"trainer": {"use_distributed_sampler": asked}}
    switches = [loader_switches(config, data)["use_distributed_sampler"] for data in (Adding(), PlainData(Plain()))]
    assert switches == [own, plain]


IDENTITY, FAILING, SHELL = ({"_target_": name} for name in ("torch.nn.Identity", "mynet.net.Failing", "os.system"))
SORTED = {"_target_": "lightning.pytorch.profilers.PyTorchProfiler", "sort_by_key": "name"}
BLOCKED = "Target 'os.system' is blocklisted because it allows … … … …"  # Hydra's whole sentence
VARYING = DataSpec("sequence", (9, 2), "class", 2, variable_length=True)
AUGMENT = "data.augment.shift, data.augment.rotation, data.augment.crop, data.augment.flip"
# A section, its node, and the error message; "…" stands for any text.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # an object of another kind than the section's
    ("model", {"_target_": "torch.utils.data.DataLoader", "dataset": [1]}, "model: got DataLoader, takes an nn.Module"),
    ("data", IDENTITY, "data: got Identity, takes a LightningDataModule"),
    ("optimizer", IDENTITY, "optimizer: got Identity, takes a torch.optim.Optimizer"),
    ("trainer", IDENTITY, "trainer: got Identity, takes a lightning.Trainer"),
    ("callbacks.mine", IDENTITY, "callbacks.mine: got Identity, takes a Callback of Lightning"),
    ("logger.mine", IDENTITY, "logger.mine: got Identity, takes a Logger of Lightning"),
    # what a constructor raises
    ("model", FAILING, f"model: KeyError: 'size' (mynet/net.py, line {LINE})"),
    ("model", {"_target_": "mynet.net.Leaving"}, f"model: SystemExit: no such size (mynet/net.py, line {LINE + 4})"),
    ("model", {"_target_": "mynet.net.Net", "encoder": FAILING}, f"model.encoder: KeyError: 'size' (mynet/net.py, line {LINE})"),
    ("model", {"_target_": "torch.nn.Sequential", "_args_": [LAYERS[1] | {"in_features": "x"}]}, "model._args_0: …"),
    ("model", {"_target_": "mynet.net.Net"}, "model: Net.__init__() missing 1 required positional argument: 'encoder'"),
    ("trainer", TRAINER | {"profiler": SORTED}, "trainer.profiler: Found sort_by_key: name…"),
    ("data", {"_target_": "batchscope.data.mnist.MNIST", "augment": 2}, f"data.augment: got 2, takes null; its options are {AUGMENT}"),
    # a function that runs commands
    ("model", SHELL | {"command": "touch ran"}, f"model: {BLOCKED}"),
    ("model", {"_target_": "mynet.net.Net", "encoder": SHELL | {"command": "touch ran"}}, f"model.encoder: {BLOCKED}"),
    # a model for other data
    ("model", IDENTITY, "model: Identity reads sequences of one length: its forward takes no `lengths`, and those of toy vary"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "node", "said"), REFUSED)
def test_what_cannot_be_built_is_one_line(path: str, node: dict[str, Any], said: str) -> None:
    data = SimpleNamespace(spec=VARYING if node is IDENTITY else SPEC, name="toy")
    line = refusal(build, node, path) if path != "model" else refusal(build_model, {"model": node}, data)
    assert re.fullmatch(".+".join(map(re.escape, said.split("…"))), line)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("mynet.net.Nets", "AttributeError: module 'mynet.net' has no attribute 'Nets'"),
        ("mynet.missing.Net", "AttributeError: module 'mynet' has no attribute 'missing'"),
        ("nowhere_at_all.Net", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("mynet.absent.Net", "ModuleNotFoundError: No module named 'nowhere_at_all' (mynet/absent.py, line 1)"),
        ("mynet.raises.Net", "ZeroDivisionError: division by zero (mynet/raises.py, line 2)"),
        ("mynet.leaves.Net", "SystemExit: 3 (mynet/leaves.py, line 1)"),
        ("mynet.broken.Net", "SyntaxError: '(' was never closed (broken.py, line 1)"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_imported_is_told_with_its_place(target: str, cause: str) -> None:
    node, message = {"_target_": target}, f"_target_: {target} cannot be imported: {cause}"
    assert refusal(build, node, "model") == f"model.{message}"
    assert refusal(build, {"_target_": "torch.nn.Sequential", "_args_": [node]}, "model") == f"model._args_.0.{message}"


@pytest.mark.parametrize("target", ["mynet.net.stopped", "mynet.stopped.Net"])
def test_a_signal_while_something_is_built_or_imported_is_no_mistake_of_it(target: str) -> None:
    for node in ({"_target_": target}, {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": target}]}):
        with pytest.raises(Interrupted, match="SIGTERM"):
            build(node, "model")


@pytest.mark.parametrize(("model", "named"), [({"name": "resnet18"}, "resnet18"), ({}, "torchvision")])
def test_a_run_is_named_after_the_network_of_torchvision_where_its_model_is_one(model: dict, named: str) -> None:
    """The choices come from a record, which may name torchvision for any model."""
    assert run_name({"model": model}, {"model": "torchvision"}, "mnist", 8) == f"{named}-mnist-bs8"
