"""What every dataset owes; a new one is tested because its YAML exists."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F
from torchvision import datasets

from batchscope.data.adding import Adding
from batchscope.data.cifar10 import CIFAR10
from batchscope.data.copy_memory import LENGTH, SYMBOLS, CopyMemory
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.mnist import MNIST, FashionMNIST
from batchscope.data.sequential_mnist import SequentialMNIST
from batchscope.data.torchvision_images import TorchvisionImages
from batchscope.errors import UserError
from batchscope.options import signatures
from batchscope.options.compose import check_command_line, compose
from batchscope.options.groups import CONFIGS
from batchscope.training.build import build

OPTIONS = sorted(file.stem for file in (CONFIGS / "data").glob("*.yaml"))
SMALL = {"num_train": 200, "num_val": 50, "num_test": 60}
BATCH_OPTIONS = ("batch_size", "pipeline", "num_workers", "seed")
SPLITS = ("train", "val", "test")
every_dataset = pytest.mark.parametrize("option", OPTIONS)

Make = Callable[..., TensorDataModule]


@pytest.fixture
def make(small_official: Callable[[type[TorchvisionImages]], Path], tmp_path: Path) -> Make:
    """Build and load a dataset by the name of its YAML, shrunk, on small files where it reads any."""
    root: dict[str, Path] = {}

    def make(option: str, **changes: Any) -> TensorDataModule:
        node = node_of(option)
        kind = get_class(node["_target_"])
        node |= {key: value for key, value in SMALL.items() if key in node}
        if "root" in node:
            if option not in root:
                root[option] = small_official(kind) if issubclass(kind, TorchvisionImages) else tmp_path
            node["root"] = str(root[option])
        data = build(node | changes, "data")
        data.check()
        data.prepare_data()
        data.setup("fit")
        data.setup("test")
        return data

    return make


def node_of(option: str) -> dict[str, Any]:
    return OmegaConf.to_container(compose([f"data={option}"]).data, resolve=True)


def rows(x: Tensor) -> set[bytes]:
    return {sample.numpy().tobytes() for sample in x.contiguous()}


# --- every dataset ---------------------------------------------------------------------------------------------------


def test_every_dataset_takes_the_same_batch_options_with_the_same_defaults() -> None:
    shared = [{key: node_of(option)[key] for key in BATCH_OPTIONS} for option in OPTIONS]
    assert len(OPTIONS) >= 7
    assert shared == [{"batch_size": 128, "pipeline": "memory", "num_workers": 2, "seed": 0}] * len(OPTIONS)


@pytest.mark.slow
def test_a_sweep_over_all_datasets_finds_them_and_no_shared_file() -> None:
    runs = check_command_line(["data=glob(*)", "model=lstm_cell"], multirun=True)
    assert [run["data"]["_target_"] for run in runs] == [node_of(option)["_target_"] for option in OPTIONS]


@every_dataset
def test_what_a_dataset_says_of_itself_is_true(option: str, make: Make) -> None:
    data = make(option)
    spec = data.spec
    assert signatures.class_attribute(node_of(option)["_target_"], "kind") == data.kind == spec.kind  # not imported
    for split in SPLITS:
        x, y = data.tensors(split)
        assert x.shape == (SMALL[f"num_{split}"], *spec.input_shape)
        assert x.dtype == torch.float32
        if spec.target == "value":
            assert y.shape == (len(x),)
            assert y.dtype == torch.float32
        else:
            assert y.shape == ((len(x),) if spec.target == "class" else (len(x), spec.input_shape[0]))
            assert y.dtype == torch.int64
            assert 0 <= y.min() <= y.max() < spec.num_outputs
    assert spec.num_outputs == 1 or spec.target != "value"
    assert len(spec.classes) in (0, spec.num_outputs)
    assert len(spec.mean) == len(spec.std)
    assert len(spec.mean) in (0, spec.input_shape[0])


@every_dataset
def test_every_class_is_among_the_training_targets(option: str, make: Make) -> None:
    data = make(option)
    classes = data.tensors("train")[1].unique().tolist()
    assert data.spec.target == "value" or classes == list(range(data.spec.num_outputs))


@every_dataset
def test_the_seed_alone_decides_the_data_and_the_fingerprint(option: str, make: Make) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(option, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = make(option, seed=5)
    for split in SPLITS:
        assert all(map(torch.equal, first.tensors(split), second.tensors(split)))
    assert first.fingerprint == second.fingerprint
    other = make(option, seed=6)
    assert first.fingerprint != other.fingerprint
    for split in ("train", "val"):
        assert rows(first.tensors(split)[0]) != rows(other.tensors(split)[0])


@every_dataset
def test_no_sample_is_in_two_splits(option: str, make: Make) -> None:
    data = make(option)
    found = [rows(data.tensors(split)[0]) for split in SPLITS]
    assert len(set.union(*found)) == sum(map(len, found))


@every_dataset
def test_a_changed_pixel_or_label_changes_the_fingerprint(option: str, make: Make) -> None:
    data = make(option)
    before = data.fingerprint
    for tensor in (*data.tensors("train"), *data.tensors("val")):
        last = tensor[-1].clone()
        tensor[-1] += 1
        assert data.fingerprint != before
        tensor[-1] = last
        assert data.fingerprint == before


# --- adding ----------------------------------------------------------------------------------------------------------


def loaded(data: TensorDataModule, split: str = "train") -> tuple[Tensor, Tensor]:
    data.prepare_data()
    data.setup("test" if split == "test" else "fit")
    return data.tensors(split)


@pytest.mark.parametrize("steps", [2, 3, 25, 100])
def test_adding_asks_for_the_sum_of_two_numbers_one_marked_in_each_half(steps: int) -> None:
    x, y = loaded(Adding(sequence_length=steps, num_train=500, num_val=1))
    numbers, marks = x.unbind(dim=2)
    assert set(marks.flatten().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close((numbers * marks).sum(dim=1), y)
    assert (marks[:, : steps // 2].sum(dim=1) == 1).all()
    assert (marks[:, steps // 2 :].sum(dim=1) == 1).all()


def test_always_answering_1_to_the_adding_problem_costs_a_sixth() -> None:
    _, y = loaded(Adding(sequence_length=50, num_train=50_000, num_val=1))
    assert F.mse_loss(torch.ones_like(y), y).item() == pytest.approx(1 / 6, rel=0.02)


# --- copy memory -----------------------------------------------------------------------------------------------------


def test_a_copy_memory_example_is_laid_out_as_described() -> None:
    x, y = loaded(CopyMemory(delay=4, num_train=3, num_val=1))
    for inputs, targets in zip(x.argmax(dim=2).tolist(), y.tolist(), strict=True):
        symbols = inputs[:10]
        assert all(1 <= symbol <= 8 for symbol in symbols)
        assert inputs == [*symbols, 0, 0, 0, 9, *[0] * 10]
        assert targets == [*[0] * 14, *symbols]
    assert (x.sum(dim=2) == 1).all()
    assert set(x.flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("delay", [1, 10, 100])
def test_the_memoryless_loss_of_copy_memory_is_the_known_one(delay: int) -> None:
    _, y = loaded(CopyMemory(delay=delay, num_train=20, num_val=1))
    steps = delay + 2 * LENGTH
    guess = torch.full((20, steps, SYMBOLS + 1), -torch.inf)
    guess[:, :-LENGTH, 0] = 0  # sure of a blank, until any symbol is as likely as another
    guess[:, -LENGTH:, 1:] = 0
    loss = F.cross_entropy(guess.flatten(0, 1), y.flatten())
    assert loss.item() == pytest.approx(10 * math.log(8) / (delay + 20), rel=1e-5)


def test_copy_memory_is_the_same_data_in_every_version() -> None:
    data = CopyMemory(delay=10, num_train=300, num_val=20, seed=3)
    data.setup("fit")
    assert data.fingerprint == "dc895e6cdbdb2ed2"


# --- images ----------------------------------------------------------------------------------------------------------


def restored(x: Tensor, data: TensorDataModule) -> Tensor:
    """The bytes that a normalised image was made from."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.spec.mean, data.spec.std))
    return ((x * std + mean) * 255).round().to(torch.uint8)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_images_are_the_official_ones_normalised(
    kind: type[TorchvisionImages], small_official: Callable[..., Path]
) -> None:
    data = kind(root=str(small_official(kind)), num_val=50)
    x, y = loaded(data, "test")
    official = kind.source(str(data.root), train=False)
    assert torch.equal(restored(x, data)[:, 0], official.data)
    assert torch.equal(y, official.targets)


def test_colour_images_have_their_channels_first(small_official: Callable[..., Path]) -> None:
    data = CIFAR10(root=str(small_official(CIFAR10)), num_val=50)
    x, y = loaded(data, "test")
    official = datasets.CIFAR10(str(data.root), train=False)
    assert torch.equal(restored(x, data).permute(0, 2, 3, 1), torch.as_tensor(official.data))
    assert y.tolist() == official.targets


def test_training_and_validation_images_together_are_the_training_set(small_official: Callable[..., Path]) -> None:
    data = MNIST(root=str(small_official(MNIST)), num_val=50)
    (train_x, _), (val_x, _) = loaded(data, "train"), loaded(data, "val")
    official = datasets.MNIST(str(data.root), train=True).data[:, None]
    assert rows(restored(torch.cat([train_x, val_x]), data)) == rows(official)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10, SequentialMNIST])
def test_fewer_images_are_the_first_of_those_that_all_would_be(
    kind: type[TorchvisionImages], small_official: Callable[..., Path]
) -> None:
    root = str(small_official(kind))
    few, every = kind(root=root, num_val=50, num_train=7, num_test=3), kind(root=root, num_val=50)
    for split, size in (("train", 7), ("val", 50), ("test", 3)):
        assert all(map(torch.equal, few.load(split), (tensor[:size] for tensor in every.load(split))))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_val": 250}, "data.num_val: got 250, takes fewer than the 250 training images"),
        (
            {"num_train": 201},
            "data.num_train: got 201, takes at most the 200 training images beside 50 of data.num_val",
        ),
        ({"num_test": 61}, "data.num_test: got 61, takes at most the 60 test images"),
    ],
)
def test_more_images_than_there_are_are_one_line(
    sizes: dict[str, int], said: str, small_official: Callable[..., Path]
) -> None:
    data = MNIST(**{"root": str(small_official(MNIST)), "num_val": 50, **sizes})
    with pytest.raises(UserError) as caught:
        for split in SPLITS:
            data.load(split)
    assert str(caught.value) == said


# --- the real MNIST --------------------------------------------------------------------------------------------------


def test_the_real_mnist_is_split_55000_5000_10000(shared_data: Path) -> None:
    data = MNIST(root=str(shared_data))
    data.setup("fit")
    data.setup("test")
    assert data.name == "mnist"
    assert {split: tuple(data.tensors(split)[0].shape) for split in SPLITS} == {
        "train": (55_000, 1, 28, 28),
        "val": (5_000, 1, 28, 28),
        "test": (10_000, 1, 28, 28),
    }
    assert data.tensors("train")[0].mean().item() == pytest.approx(0, abs=0.01)
    assert data.tensors("train")[0].std().item() == pytest.approx(1, abs=0.01)
    assert data.tensors("test")[1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


# --- sequential MNIST ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored_images(mnist_files: Path) -> tuple[Tensor, Tensor]:
    return MNIST(root=str(mnist_files)).load("test")


def sequences(mnist_files: Path, **options: Any) -> tuple[Tensor, Tensor, SequentialMNIST]:
    data = SequentialMNIST(root=str(mnist_files), **options)
    return *data.load("test"), data


def test_sequential_mnist_reads_a_row_a_step(mnist_files: Path, stored_images: tuple[Tensor, Tensor]) -> None:
    images, labels = stored_images
    x, y, data = sequences(mnist_files, steps="rows")
    assert data.spec.input_shape == (28, 28)
    assert data.name == "sequential-mnist-rows"
    assert torch.equal(y, labels)
    for step in range(28):
        assert torch.equal(x[:, step], images[:, 0, step])


def test_sequential_mnist_reads_a_pixel_a_step(mnist_files: Path, stored_images: tuple[Tensor, Tensor]) -> None:
    images, labels = stored_images
    x, y, data = sequences(mnist_files, steps="pixels")
    assert data.spec.input_shape == (784, 1)
    assert data.name == "sequential-mnist-pixels"
    assert torch.equal(y, labels)
    assert torch.equal(x[:, 28 * 3 + 5, 0], images[:, 0, 3, 5])
    assert torch.equal(x.view(-1, 28, 28), images[:, 0])


@pytest.mark.parametrize("steps", ["rows", "pixels"])
def test_permuted_mnist_has_the_same_pixels_in_one_order_for_all_images_and_seeds(
    steps: str, mnist_files: Path, stored_images: tuple[Tensor, Tensor]
) -> None:
    images, labels = (tensor[:2_000] for tensor in stored_images)
    x, y, data = sequences(mnist_files, steps=steps, permute=True, seed=0)
    x = x.flatten(start_dim=1)
    assert data.name == f"sequential-mnist-{steps}-permuted"
    assert torch.equal(y[:2_000], labels)
    assert torch.equal(x[:2_000].sort(dim=1).values, images.flatten(start_dim=1).sort(dim=1).values)
    assert not torch.equal(x[:2_000], images.flatten(start_dim=1))
    other = sequences(mnist_files, steps="rows", permute=True, seed=1)[0].flatten(start_dim=1)
    assert torch.equal(x, other)


def permutation() -> list[int]:
    """Where each pixel of a permuted image comes from, found by an image whose pixels are their own places."""

    class Places(SequentialMNIST):
        mean, std = (0.0,), (1.0,)

        def _raw(self, train: bool) -> tuple[Tensor, Tensor]:
            return torch.arange(784).view(1, 1, 28, 28), torch.zeros(1, dtype=torch.long)

    x, _ = Places(permute=True).load("test")
    return (x.flatten() * 255).round().long().tolist()


def test_the_permutation_is_a_fixed_one() -> None:
    """Published results are comparable only while nobody changes it: the first pixels, written down."""
    order = permutation()
    assert sorted(order) == list(range(784))
    assert order[:8] == [573, 773, 173, 195, 184, 456, 105, 290]
