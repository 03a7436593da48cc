"""What every dataset owes, tested because its YAML exists; and what each one holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

from batchscope.data.adding import Adding
from batchscope.data.cifar10 import CIFAR10
from batchscope.data.copy_memory import CopyMemory
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.digits import Digits
from batchscope.data.mnist import MNIST, FashionMNIST
from batchscope.data.sequential_mnist import SequentialMNIST
from batchscope.data.torchvision_images import TorchvisionImages
from batchscope.options import signatures
from batchscope.options.compose import compose
from batchscope.options.groups import CONFIGS
from batchscope.training.build import build
from tests.support.command_lines import refusal

OPTIONS = sorted(file.stem for file in (CONFIGS / "data").glob("*.yaml"))
BATCHES = {"batch_size": 128, "pipeline": "memory", "num_workers": 2, "seed": 0}
SMALL = {"num_train": 200, "num_val": 50, "num_test": 60}
SPLITS = ("train", "val", "test")
every_dataset = pytest.mark.parametrize("option", OPTIONS)

Make = Callable[..., TensorDataModule]


def node_of(option: str) -> dict[str, Any]:
    return OmegaConf.to_container(compose([f"data={option}"]).data, resolve=True)


def loaded(data: TensorDataModule) -> TensorDataModule:
    data.check()
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    return data


@pytest.fixture
def make(small_official: Callable[[type[TorchvisionImages]], Path], tmp_path: Path) -> Make:
    """Build and load a dataset by the name of its YAML, shrunk, on small files where it reads any."""
    roots: dict[str, Path] = {}

    def make(option: str, **changes: Any) -> TensorDataModule:
        node = node_of(option)
        kind = get_class(node["_target_"])
        node |= {key: value for key, value in SMALL.items() if key in node}
        if "root" in node:
            if option not in roots:
                roots[option] = small_official(kind) if issubclass(kind, TorchvisionImages) else tmp_path
            node["root"] = str(roots[option])
        return loaded(build(node | changes, "data"))

    return make


def rows(x: Tensor) -> set[bytes]:
    return {sample.numpy().tobytes() for sample in x.contiguous()}


@every_dataset
def test_what_a_dataset_says_of_itself_is_true(option: str, make: Make) -> None:
    data, node = make(option), node_of(option)
    spec, found = data.spec, [data.tensors(split) for split in SPLITS]
    assert len(OPTIONS) >= 7
    assert {key: node[key] for key in BATCHES} == BATCHES
    assert signatures.class_attribute(node["_target_"], "kind") == data.kind == spec.kind  # not imported
    for split, (x, y) in zip(SPLITS, found, strict=True):
        assert (x.shape, x.dtype) == ((SMALL[f"num_{split}"], *spec.input_shape), torch.float32)
        assert (y.shape, y.dtype.is_floating_point) == ((len(x), *spec.target_shape), spec.target == "value")
        classes = y.unique().tolist()
        assert spec.target == "value" or classes == [*range(spec.num_outputs)]
    assert len(spec.classes) in (0, spec.num_outputs)
    assert len(spec.mean) == len(spec.std)
    assert len(spec.mean) in (0, spec.input_shape[0])
    samples = [rows(x) for x, _ in found]
    assert len(set.union(*samples)) == sum(SMALL.values())  # none is in two splits


@every_dataset
def test_the_seed_alone_decides_the_data_and_the_fingerprint(option: str, make: Make) -> None:
    before = torch.get_rng_state()
    first = make(option, seed=5)
    assert torch.equal(torch.get_rng_state(), before)  # the model's
    torch.manual_seed(2)
    second, other = make(option, seed=5), make(option, seed=6)
    for split in SPLITS:
        assert all(map(torch.equal, first.tensors(split), second.tensors(split)))
        assert split == "test" or rows(first.tensors(split)[0]) != rows(other.tensors(split)[0])
    known = first.fingerprint
    assert known == second.fingerprint != other.fingerprint
    for tensor in (*first.tensors("train"), *first.tensors("val")):
        last = tensor[-1].clone()
        tensor[-1] += 1
        assert first.fingerprint != known
        tensor[-1] = last
    assert first.fingerprint == known


@pytest.mark.parametrize("steps", [2, 3, 25])
def test_adding_asks_for_the_sum_of_two_numbers_one_marked_in_each_half(steps: int) -> None:
    x, y = Adding(sequence_length=steps, num_train=20_000).load("train")
    numbers, marks = x.unbind(dim=2)
    assert set(marks.flatten().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close((numbers * marks).sum(dim=1), y)
    assert (marks[:, : steps // 2].sum(dim=1) == 1).all()
    assert (marks[:, steps // 2 :].sum(dim=1) == 1).all()
    assert marks.any(dim=0).all()
    assert F.mse_loss(torch.ones_like(y), y).item() == pytest.approx(1 / 6, rel=0.03)  # of numbers from 0 to 1


def test_a_copy_memory_example_is_laid_out_as_described() -> None:
    x, y = CopyMemory(delay=4, num_train=3).load("train")
    for inputs, targets in zip(x.argmax(dim=2).tolist(), y.tolist(), strict=True):
        symbols = inputs[:10]
        assert all(1 <= symbol <= 8 for symbol in symbols)
        assert inputs == [*symbols, 0, 0, 0, 9, *[0] * 10]
        assert targets == [*[0] * 14, *symbols]
    assert (x.sum(dim=2) == 1).all()
    assert set(x.flatten().tolist()) == {0.0, 1.0}


def test_copy_memory_is_the_same_data_in_every_version() -> None:
    data = CopyMemory(delay=10, num_train=300, num_val=20, seed=3)
    assert loaded(data).fingerprint == "dc895e6cdbdb2ed2"


def test_pixels_of_digits_are_served_between_minus_1_and_1(tmp_path: Path) -> None:
    x, _ = Digits(root=str(tmp_path), num_train=50).load("train")
    assert x.min() == -1
    assert 0.5 < x.max() <= 1


def restored(x: Tensor, data: TensorDataModule) -> Tensor:
    """The bytes that a normalised image was made from."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.spec.mean, data.spec.std))
    return ((x * std + mean) * 255).round().to(torch.uint8)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10])
def test_images_are_the_official_ones_normalised(kind: type[TorchvisionImages], small_official) -> None:
    root = str(small_official(kind))
    data = kind(root=root, num_val=50)
    for train, splits in ((False, ["test"]), (True, ["train", "val"])):
        x, y = (torch.cat(parts) for parts in zip(*map(data.load, splits), strict=True))
        official = kind.source(root, train=train)
        pixels, labels = torch.as_tensor(official.data), torch.as_tensor(official.targets)
        channels_first = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        if train:  # the two parts of a shuffled set
            assert rows(restored(x, data)) == rows(channels_first)
        else:
            assert torch.equal(restored(x, data), channels_first)
            assert torch.equal(y, labels)
    few = kind(root=root, num_val=50, num_train=7, num_test=3)  # the first of those that all would be
    for split, size in (("train", 7), ("val", 50), ("test", 3)):
        assert all(map(torch.equal, few.load(split), (tensor[:size] for tensor in data.load(split))))


@pytest.mark.parametrize(
    ("sizes", "split", "said"),
    [
        ({"num_val": 250}, "train", "num_val: got 250, takes fewer than the 250 training images"),
        ({"num_train": 201}, "train", "num_train: got 201, takes at most the 200 training images beside 50 of …"),
        ({"num_test": 61}, "test", "num_test: got 61, takes at most the 60 test images"),
    ],
)  # fmt: skip
def test_more_images_than_there_are_are_one_line(sizes: dict[str, int], split: str, said: str, small_official) -> None:
    data = MNIST(**{"root": str(small_official(MNIST)), "num_val": 50, **sizes})
    assert refusal(data.load, split).startswith(f"data.{said.removesuffix('…')}")


def test_the_real_mnist_is_split_55000_5000_10000(shared_data: Path) -> None:
    data = loaded(MNIST(root=str(shared_data)))
    assert data.name == "mnist"
    assert [len(data.tensors(split)[0]) for split in SPLITS] == [55_000, 5_000, 10_000]
    assert data.tensors("train")[0].mean().item() == pytest.approx(0, abs=0.01)
    assert data.tensors("train")[0].std().item() == pytest.approx(1, abs=0.01)
    assert data.tensors("test")[1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.parametrize(("steps", "shape"), [("rows", (28, 28)), ("pixels", (784, 1))])
def test_sequential_mnist_reads_a_row_or_a_pixel_a_step(steps: Any, shape: tuple[int, ...], small_official) -> None:
    root = str(small_official(MNIST))
    images, labels = MNIST(root=root).load("test")
    data = SequentialMNIST(root=root, steps=steps)
    x, y = data.load("test")
    assert data.name == f"sequential-mnist-{steps}"
    assert data.spec.input_shape == shape
    assert torch.equal(x, images.view(60, *shape))
    assert torch.equal(y, labels)


@pytest.mark.parametrize("steps", ["rows", "pixels"])
def test_permuted_mnist_has_the_pixels_in_one_order_for_all_images_seeds_and_versions(steps, small_official) -> None:
    """Published results are comparable only while nobody changes the order: its first pixels, written down."""
    root = str(small_official(MNIST))
    places = {
        column.numpy().tobytes(): place for place, column in enumerate(MNIST(root=root).load("test")[0].flatten(1).T)
    }
    data = SequentialMNIST(root=root, steps=steps, permute=True, seed=3)
    order = [places[column.numpy().tobytes()] for column in data.load("test")[0].flatten(1).T]
    assert sorted(order) == list(range(784))
    assert order[:8] == [573, 773, 173, 195, 184, 456, 105, 290]
    assert data.name == f"sequential-mnist-{steps}-permuted"
