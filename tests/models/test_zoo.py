"""The contract of every model of the zoo; a new model is tested because its YAML exists."""

from functools import cache
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torchvision
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from batchscope.data.spec import DataSpec
from batchscope.errors import UserError
from batchscope.models.cnn import SimpleCNN
from batchscope.models.mlp import MLP
from batchscope.models.torchvision import NATIVE_SIZE, TorchvisionModel
from batchscope.options.groups import CONFIGS
from batchscope.options.signatures import class_attribute
from batchscope.training.build import build
from tests.support.command_lines import refusal

SPECS = {
    "grey image": DataSpec(kind="image", input_shape=(1, 28, 28), target="class", num_outputs=10),
    "colour image": DataSpec(kind="image", input_shape=(3, 32, 32), target="class", num_outputs=7),
    "sequence to class": DataSpec(kind="sequence", input_shape=(9, 3), target="class", num_outputs=4),
    "sequence to classes": DataSpec(kind="sequence", input_shape=(8, 5), target="class_per_step", num_outputs=6),
    "sequence to value": DataSpec(kind="sequence", input_shape=(7, 2), target="value", num_outputs=1),
}
GREY = SPECS["grey image"]


@cache
def node_of(option: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / f"{option}.yaml"))


def accepted(option: str) -> list[str]:
    accepts = class_attribute(node_of(option)["_target_"], "accepts")
    return [name for name, spec in SPECS.items() if spec.kind in accepts]


def heavy(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def taking(*values: Any) -> Any:
    return heavy(*values) if values[0] == "torchvision" else values  # a large network takes seconds in each test


OPTIONS = sorted(file.stem for file in (CONFIGS / "model").glob("*.yaml"))
pairs = pytest.mark.parametrize(("option", "name"), [taking(o, name) for o in OPTIONS for name in accepted(o)])


def build_model(option: str, spec: DataSpec) -> nn.Module:
    torch.manual_seed(0)
    return build(node_of(option), "model", spec=spec)


def inputs(spec: DataSpec, batch: int = 6) -> Tensor:
    return torch.randn(batch, *spec.input_shape, generator=torch.Generator().manual_seed(1))


# --- every model -----------------------------------------------------------------------------------------------------


def test_every_model_of_the_zoo_says_what_it_accepts() -> None:
    assert len(OPTIONS) >= 6
    assert all(map(accepted, OPTIONS))


@pairs
def test_the_output_has_the_shape_that_is_asked_for_and_a_gradient_for_every_parameter(option: str, name: str) -> None:
    spec = SPECS[name]
    model = build_model(option, spec)
    output = model(inputs(spec))
    steps = (spec.input_shape[0],) if spec.target == "class_per_step" else ()
    assert output.shape == (6, *steps, spec.num_outputs)
    (output * torch.randn_like(output)).sum().backward()
    parameters = dict(model.named_parameters())
    assert parameters
    assert [n for n, p in parameters.items() if p.grad is None or not p.grad.isfinite().all()] == []
    assert [n for n, p in parameters.items() if not p.grad.any()] == []


@pairs
def test_a_sample_gets_the_same_output_alone_as_in_a_batch_in_double_precision(option: str, name: str) -> None:
    spec = SPECS[name]
    model, x = build_model(option, spec).double().eval(), inputs(spec).double()
    with torch.inference_mode():
        alone = model(x[:1])
        assert alone.dtype == torch.float64
        torch.testing.assert_close(alone, model(x)[:1])


@pytest.mark.parametrize("option", [option for option in OPTIONS if "sequence to value" in accepted(option)])
def test_a_recurrent_model_reads_an_image_row_by_row(option: str) -> None:
    spec = SPECS["colour image"]  # (3, 32, 32): 32 steps, each a row of all three colours
    rows = DataSpec(kind="sequence", input_shape=(32, 96), target="class", num_outputs=spec.num_outputs)
    images, as_image, as_rows = inputs(spec), build_model(option, spec).eval(), build_model(option, rows).eval()
    sequence = torch.stack([images[:, :, row].flatten(start_dim=1) for row in range(32)], dim=1)
    torch.testing.assert_close(as_image(images), as_rows(sequence))


# --- SimpleCNN and MLP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 29, 31), (2, 4, 7), (1, 64, 20)])
def test_simple_cnn_takes_images_of_any_channels_and_size(shape: tuple[int, int, int]) -> None:
    spec = DataSpec(kind="image", input_shape=shape, target="class", num_outputs=10)
    assert SimpleCNN(spec)(torch.randn(2, *shape)).shape == (2, 10)


def test_simple_cnn_pools_before_it_cuts_and_computes_what_the_other_order_does() -> None:
    torch.manual_seed(0)
    network, images = SimpleCNN(GREY), inputs(GREY, 8)
    first, _, _, second, *_ = network.features
    expected = F.max_pool2d(second(F.max_pool2d(first(images).relu(), 2)).relu(), 2)
    outputs, expected = network(images), network.classifier(expected)
    assert torch.equal(outputs, expected)
    parameters = list(network.parameters())
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad(output.square().sum(), parameters) for output in (outputs, expected)), strict=True
    ):
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("kernel_size", [1, 5, 7])
def test_simple_cnn_takes_larger_kernels_a_normalization_and_dropout(kernel_size: int) -> None:
    network = SimpleCNN(GREY, kernel_size=kernel_size, norm="batch", dropout=0.5)
    assert network(inputs(GREY, 8)).shape == (8, 10)
    norms = [layer.num_features for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert norms == [32, 64]
    assert [layer.bias for layer in network.modules() if isinstance(layer, nn.Conv2d)] == [None, None]


def test_an_mlp_without_hidden_layers_is_a_linear_classifier() -> None:
    layers = [layer for layer in MLP(GREY, hidden_sizes=[]).modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(784, 10)]


# --- torchvision -----------------------------------------------------------------------------------------------------

SIZES = {  # to which images of 28×28 are enlarged
    **dict.fromkeys(("resnet18", "squeezenet1_1", "regnet_y_400mf"), None),
    **dict.fromkeys(("vgg11", "vit_b_32", "alexnet"), NATIVE_SIZE),
}
NETWORKS = {*torchvision.models.list_models(torchvision.models)} - {"googlenet", "inception_v3"}


@pytest.mark.parametrize("name", [*SIZES, *(heavy(name) for name in sorted(NETWORKS - {*SIZES}))])
def test_any_network_is_fitted_at_both_ends_and_enlarges_images_where_it_needs_that(name: str) -> None:
    # Shapes without memory, but for RegNet, which computes with tensors while it is built.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = TorchvisionModel(GREY, name).to("meta")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert layers[0].in_channels == 1
    assert 10 in (getattr(layers[-1], "out_features", None), getattr(layers[-1], "out_channels", None))
    assert model(torch.empty(2, 1, 28, 28, device="meta")).shape == (2, 10)
    assert model.image_size == SIZES.get(name, model.image_size)


def test_images_are_resized_when_asked_to() -> None:
    model = TorchvisionModel(GREY, "squeezenet1_1", image_size=48)
    shapes = []
    model.network.register_forward_pre_hook(lambda _, arguments: shapes.append(arguments[0].shape))
    model(inputs(GREY, 2))
    assert shapes == [(2, 1, 48, 48)]


def test_images_are_enlarged_to_the_one_size_that_a_network_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a ViT for 384 pixels require that size."""
    vit = torchvision.models.VisionTransformer(64, 16, num_layers=1, num_heads=1, hidden_dim=4, mlp_dim=4)
    monkeypatch.setattr("torchvision.models.get_model", lambda *_, **__: vit)
    model = TorchvisionModel(GREY, "vit_b_16")
    assert (model.image_size, model.input_shape) == (64, (1, 64, 64))
    assert model(inputs(GREY, 2)).shape == (2, 10)
    assert refusal(TorchvisionModel, GREY, "vit_b_16", image_size=224).endswith("cannot run on; it does on 64")


def test_finding_the_image_size_leaves_the_weights_and_statistics_alone() -> None:
    network = TorchvisionModel(GREY, "resnet18").network
    assert not network.bn1.num_batches_tracked
    assert {tensor.device.type for tensor in network.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (SimpleCNN, {"channels": [8, 16, 32]}, r"model\.channels: got \[8, 16, 32\], takes two whole numbers"),
        (SimpleCNN, {"kernel_size": 4}, r"model\.kernel_size: got 4, takes an odd number"),
        (TorchvisionModel, {"name": "resnet81"}, r"model\.name: got 'resnet81'.* Did you mean 'resnet\d+'\?"),
        (TorchvisionModel, {"name": "googlenet"}, r"model\.name: got 'googlenet', takes a network of torchvision with one output\."),
        (TorchvisionModel, {"name": "squeezenet1_1", "image_size": 8}, r"model\.image_size: got 8, .* it does on 224"),
        (TorchvisionModel, {"weights": "IMAGENET"}, r"model\.weights: got 'IMAGENET', takes .*IMAGENET1K_V1.* Did you mean"),
        (TorchvisionModel, {"weights": "DEFAULT"}, r"model\.weights: DEFAULT of resnet18 could not be downloaded: .*refused"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    model: type, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("<urlopen error [Errno 111] Connection refused>")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", no_network)
    with pytest.raises(UserError, match=f"^{reason}"):
        model(GREY, **options)


@pytest.mark.parametrize("error", [IncompleteRead(b""), RuntimeError("invalid hash value"), EOFError("out of input")])
def test_a_download_that_breaks_off_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", Mock(side_effect=error))
    message = f"model.weights: DEFAULT of resnet18 could not be downloaded: {type(error).__name__}: "
    assert refusal(TorchvisionModel, GREY, weights="DEFAULT").startswith(message)


def test_what_fails_while_a_network_is_built_is_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.models.get_model", Mock(side_effect=RuntimeError("not enough memory")))
    with pytest.raises(RuntimeError, match="^not enough memory$"):
        TorchvisionModel(GREY)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_pretrained_weights_are_kept_but_for_the_ends(channels: int, monkeypatch) -> None:
    pretrained = torchvision.models.get_model("resnet18").state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: pretrained)
    spec = DataSpec(kind="image", input_shape=(channels, 32, 32), target="class", num_outputs=10)
    model = TorchvisionModel(spec, "resnet18", weights="DEFAULT")
    unchanged = {
        k for k, v in model.network.state_dict().items() if v.shape == pretrained[k].shape and v.equal(pretrained[k])
    }
    new = {"fc.weight", "fc.bias"} | {key for key in list(pretrained)[:1] if channels != 3}
    assert model.network.state_dict().keys() - unchanged == new
    assert model(inputs(spec, 2)).shape == (2, 10)


@pytest.mark.parametrize("forced", ["0", "1"])
def test_code_in_a_file_of_pretrained_weights_is_not_run(forced: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", forced)

    class Payload:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(Payload(), tmp_path / "checkpoints" / url.rpartition("/")[2])
    with pytest.raises(UserError, match="holds more than tensors"):
        build(node_of("torchvision") | {"weights": "DEFAULT"}, "model", spec=GREY)
    assert not (tmp_path / "ran").exists()
