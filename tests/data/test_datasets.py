"""The contract of every dataset, tested because its YAML exists, and the contents of each."""

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
from batchscope.data.copy_memory import CopyMemory
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.digits import Digits
from batchscope.data.torchvision_images import TorchvisionImages
from batchscope.options import signatures
from batchscope.options.compose import compose
from batchscope.options.groups import CONFIGS
from batchscope.training.build import build
from tests.data.support import prepared

OPTIONS = sorted(file.stem for file in (CONFIGS / "data").glob("*.yaml"))
SMALL = {"num_train": 200, "num_val": 50, "num_test": 60}
SPLITS = ("train", "val", "test")
every_dataset = pytest.mark.parametrize("option", OPTIONS)

Make = Callable[..., TensorDataModule]


def node_of(option: str) -> dict[str, Any]:
    return OmegaConf.to_container(compose([f"data={option}"]).data, resolve=True)


@pytest.fixture
def make(small_official: Callable[[type[TorchvisionImages]], Path], tmp_path: Path) -> Make:
    """Build and load a small version of a dataset by its option; one that reads files gets small files."""

    def make(option: str, **changes: Any) -> TensorDataModule:
        node = node_of(option)
        kind = get_class(node["_target_"])
        node |= {key: value for key, value in SMALL.items() if key in node}
        if "root" in node:
            node["root"] = str(small_official(kind) if issubclass(kind, TorchvisionImages) else tmp_path)
        return prepared(build(node | changes, "data"))

    return make


def rows(x: Tensor) -> set[bytes]:
    return {sample.numpy().tobytes() for sample in x.contiguous()}


@every_dataset
def test_what_a_dataset_says_of_itself_is_true(option: str, make: Make) -> None:
    data, node = make(option), node_of(option)
    spec, tensors = data.spec, [data.tensors(split) for split in SPLITS]
    assert len(OPTIONS) >= 7
    assert [node[key] for key in ("batch_size", "pipeline", "num_workers", "seed")] == [128, "memory", 2, 0]
    assert signatures.class_attribute(node["_target_"], "kind") == data.kind == spec.kind  # not imported
    for split, (x, y) in zip(SPLITS, tensors, strict=True):
        assert (x.shape, x.dtype) == ((SMALL[f"num_{split}"], *spec.input_shape), torch.float32)
        assert (y.shape, y.dtype.is_floating_point) == ((len(x), *spec.target_shape), spec.target == "value")
        classes = y.unique().tolist()
        assert spec.target == "value" or classes == [*range(spec.num_outputs)]
    assert len(spec.classes) in (0, spec.num_outputs)
    assert len(spec.mean) == len(spec.std)
    assert len(spec.mean) in (0, spec.input_shape[0])
    samples = [rows(x) for x, _ in tensors]
    assert len(set.union(*samples)) == sum(SMALL.values())  # no sample is in two splits


@every_dataset
def test_the_seed_alone_decides_the_data_and_the_fingerprint(option: str, make: Make) -> None:
    before = torch.get_rng_state()
    first = make(option, seed=5)
    assert torch.equal(torch.get_rng_state(), before)  # the random state of the model
    torch.manual_seed(2)
    second, other = make(option, seed=5), make(option, seed=6)
    for split in SPLITS:
        assert all(map(torch.equal, first.tensors(split), second.tensors(split)))
        assert split == "test" or rows(first.tensors(split)[0]) != rows(other.tensors(split)[0])
    fingerprint = first.fingerprint
    assert fingerprint == second.fingerprint != other.fingerprint
    for tensor in (*first.tensors("train"), *first.tensors("val")):
        last = tensor[-1].clone()
        tensor[-1] += 1
        assert first.fingerprint != fingerprint
        tensor[-1] = last
    assert first.fingerprint == fingerprint


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
    assert prepared(data).fingerprint == "dc895e6cdbdb2ed2"


def test_pixels_of_digits_are_served_between_minus_1_and_1(tmp_path: Path) -> None:
    x, _ = Digits(root=str(tmp_path), num_train=50).load("train")
    assert x.min() == -1
    assert 0.5 < x.max() <= 1
