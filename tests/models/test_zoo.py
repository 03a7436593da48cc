"""What every model of the zoo owes; a new one is tested because its YAML exists."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from omegaconf import OmegaConf
from torch import Tensor, nn

from batchscope.data.spec import DataSpec
from batchscope.errors import UserError
from batchscope.models.cnn import SimpleCNN
from batchscope.models.mlp import MLP
from batchscope.models.torchvision import NATIVE_SIZE, TorchvisionModel
from batchscope.options.groups import CONFIGS
from batchscope.options.signatures import class_attribute
from batchscope.training.build import build

SPECS = {
    "grey image": DataSpec(kind="image", input_shape=(1, 28, 28), target="class", num_outputs=10),
    "colour image": DataSpec(kind="image", input_shape=(3, 32, 32), target="class", num_outputs=7),
    "sequence to class": DataSpec(kind="sequence", input_shape=(9, 3), target="class", num_outputs=4),
    "sequence to classes": DataSpec(kind="sequence", input_shape=(8, 5), target="class_per_step", num_outputs=6),
    "sequence to value": DataSpec(kind="sequence", input_shape=(7, 2), target="value", num_outputs=1),
}
GREY = SPECS["grey image"]
YAMLS = sorted((CONFIGS / "model").glob("*.yaml"))


@cache
def node_of(option: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / f"{option}.yaml"))


def accepted(option: str) -> list[str]:
    accepts = class_attribute(node_of(option)["_target_"], "accepts")
    return [name for name, spec in SPECS.items() if spec.kind in accepts]


OPTIONS = [file.stem for file in YAMLS]
# A large network takes seconds in each test; by default it is built once, for the shape of its output.
LARGE = "torchvision"
marks = {option: [pytest.mark.slow] * (option == LARGE) for option in OPTIONS}
PAIRS = [
    pytest.param(option, name, marks=marks[option], id=f"{option}: {name}")
    for option in OPTIONS
    for name in accepted(option)
]
pairs = pytest.mark.parametrize(("option", "name"), PAIRS)
models = pytest.mark.parametrize("option", [pytest.param(option, marks=marks[option]) for option in OPTIONS])


def build_model(option: str, spec: DataSpec, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(node_of(option), "model", spec=spec)


def inputs(spec: DataSpec, batch: int = 6) -> Tensor:
    return torch.randn(batch, *spec.input_shape, generator=torch.Generator().manual_seed(1))


# --- every model -----------------------------------------------------------------------------------------------------


def test_the_zoo_has_models() -> None:
    assert len(YAMLS) >= 6


@models
def test_a_model_says_what_it_accepts(option: str) -> None:
    accepts = class_attribute(node_of(option)["_target_"], "accepts")
    assert accepts
    assert set(accepts) <= {"image", "sequence"}


@pytest.mark.parametrize(("option", "name"), [param.values for param in PAIRS], ids=[param.id for param in PAIRS])
def test_the_output_has_the_shape_that_the_data_asks_for(option: str, name: str) -> None:
    spec = SPECS[name]
    steps = (spec.input_shape[0],) if spec.target == "class_per_step" else ()
    assert build_model(option, spec)(inputs(spec)).shape == (6, *steps, spec.num_outputs)


@pairs
def test_every_parameter_gets_a_gradient(option: str, name: str) -> None:
    spec = SPECS[name]
    model = build_model(option, spec)
    output = model(inputs(spec))
    (output * torch.randn_like(output)).sum().backward()
    parameters = dict(model.named_parameters())
    assert parameters
    assert [n for n, p in parameters.items() if p.grad is None or not p.grad.isfinite().all()] == []
    assert [n for n, p in parameters.items() if not p.grad.any()] == []


@models
def test_the_seed_decides_the_weights_and_the_output(option: str) -> None:
    spec = SPECS[accepted(option)[0]]
    first, second, other = (build_model(option, spec, seed)(inputs(spec)) for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pairs
def test_a_sample_gets_the_same_output_alone_as_in_a_batch(option: str, name: str) -> None:
    spec = SPECS[name]
    model = build_model(option, spec).eval()
    x = inputs(spec)
    with torch.no_grad():
        torch.testing.assert_close(model(x[:1]), model(x)[:1], rtol=1e-4, atol=1e-5)


@pairs
def test_a_model_works_in_double_precision(option: str, name: str) -> None:
    spec = SPECS[name]
    assert build_model(option, spec).double()(inputs(spec).double()).dtype == torch.float64


@pytest.mark.parametrize("option", [option for option in OPTIONS if "sequence to value" in accepted(option)])
def test_a_recurrent_model_reads_an_image_row_by_row(option: str) -> None:
    spec = SPECS["colour image"]  # (3, 32, 32): 32 steps, each a row of all three colours
    rows = DataSpec(kind="sequence", input_shape=(32, 96), target="class", num_outputs=spec.num_outputs)
    images, as_image, as_rows = inputs(spec), build_model(option, spec).eval(), build_model(option, rows).eval()
    sequence = torch.stack([images[:, :, row].flatten(start_dim=1) for row in range(32)], dim=1)
    torch.testing.assert_close(as_image(images), as_rows(sequence))


# --- SimpleCNN and MLP -----------------------------------------------------------------------------------------------


def test_simple_cnn_has_421_642_parameters_on_mnist() -> None:
    assert sum(p.numel() for p in SimpleCNN(GREY).parameters()) == 421_642


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 29, 31), (2, 4, 7), (1, 64, 20)])
def test_simple_cnn_takes_images_of_any_channels_and_size(shape: tuple[int, int, int]) -> None:
    spec = DataSpec(kind="image", input_shape=shape, target="class", num_outputs=10)
    assert SimpleCNN(spec)(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("channels", [[32], [8, 16, 32], []])
def test_simple_cnn_refuses_any_number_of_channels_but_two(channels: list[int]) -> None:
    with pytest.raises(UserError, match=r"model\.channels: got .* takes two whole numbers"):
        SimpleCNN(GREY, channels=channels)


def test_an_mlp_without_hidden_layers_is_a_linear_classifier() -> None:
    layers = [layer for layer in MLP(GREY, hidden_sizes=[]).modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(784, 10)]


# --- torchvision -----------------------------------------------------------------------------------------------------

NETWORKS = torchvision.models.list_models(module=torchvision.models)


def first_and_last(network: nn.Module) -> tuple[nn.Conv2d, nn.Module]:
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return layers[0], layers[-1]


def heavy(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v3_small", heavy("vgg11"), heavy("vit_b_16")])
def test_a_torchvision_network_takes_grey_images(name: str) -> None:
    model = TorchvisionModel(GREY, name)
    assert model(inputs(GREY, 2)).shape == (2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_any_torchvision_network_is_fitted_at_both_ends(name: str) -> None:
    # Shapes without memory, but for RegNet, which computes with tensors while it is built.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = TorchvisionModel(GREY, name).to("meta")
    first, last = first_and_last(model)
    assert first.in_channels == 1
    assert 10 in (getattr(last, "out_features", None), getattr(last, "out_channels", None))
    assert model(torch.empty(2, 1, 28, 28, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(("name", "size"), [("resnet18", None), ("vit_b_32", NATIVE_SIZE), ("alexnet", NATIVE_SIZE)])
def test_images_are_enlarged_where_the_network_needs_it_and_only_there(name: str, size: int | None) -> None:
    with torch.device("meta"):
        assert TorchvisionModel(GREY, name).image_size == size


def test_a_network_that_computes_while_it_is_built_is_not_taken_for_one_that_cannot_run() -> None:
    assert TorchvisionModel(GREY, "regnet_y_400mf").image_size is None


def test_images_are_resized_when_asked_to() -> None:
    model = TorchvisionModel(GREY, "squeezenet1_1", image_size=48)
    seen = []
    model.network.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape))
    model(inputs(GREY, 2))
    assert seen == [(2, 1, 48, 48)]


def test_finding_the_image_size_leaves_the_weights_and_statistics_alone() -> None:
    network = TorchvisionModel(GREY, "resnet18").network
    assert not network.bn1.num_batches_tracked
    assert {tensor.device.type for tensor in network.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize("name", ["resnet81", "ResNet-18"])
def test_an_unknown_network_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.name: got .* Did you mean 'resnet\d+'\?"):
        TorchvisionModel(GREY, name)


def test_an_image_size_that_the_network_cannot_run_on_is_refused() -> None:
    with torch.device("meta"), pytest.raises(UserError, match=r"model\.image_size: got 20, .* it does on 224"):
        TorchvisionModel(GREY, "alexnet", image_size=20)


def test_unknown_weights_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"model\.weights: got 'IMAGENET', takes .*IMAGENET1K_V1.* Did you mean"):
        TorchvisionModel(GREY, "resnet18", weights="IMAGENET")


def test_weights_that_cannot_be_downloaded_are_a_mistake_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("<urlopen error [Errno 111] Connection refused>")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", no_network)
    with pytest.raises(UserError, match=r"model\.weights: DEFAULT of resnet18 could not be downloaded"):
        TorchvisionModel(GREY, "resnet18", weights="DEFAULT")


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["resnet18", heavy("googlenet"), heavy("inception_v3")])
def test_pretrained_weights_are_kept_but_for_the_ends(
    name: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if name == "resnet18" else {"init_weights": False}
    pretrained = torchvision.models.get_model(name, weights=None, **options).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: pretrained)
    spec = DataSpec(kind="image", input_shape=(channels, 32, 32), target="class", num_outputs=10)
    model = TorchvisionModel(spec, name, weights="DEFAULT")

    new = {key for key, value in model.network.state_dict().items() if not _same(value, pretrained[key])}
    first = {key for key in list(pretrained)[:1] if channels != 3}
    assert new == first | {"fc.weight", "fc.bias"}
    assert model(inputs(spec, 2)).shape == (2, 10)


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(tensor, other)


@pytest.mark.parametrize(
    "force", [{}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}], ids=str
)
def test_code_in_a_file_of_pretrained_weights_is_not_run(
    force: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in force.items():
        monkeypatch.setenv(name, value)
    environ = dict(os.environ)

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
    assert dict(os.environ) == environ
