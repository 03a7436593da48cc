"""Small files in the layout of torchvision's datasets, and this process as any rank."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torchvision import datasets

from batchscope.data.cifar10 import CIFAR10
from batchscope.data.torchvision_images import TorchvisionImages
from tests.support import fabricated_mnist


def small_cifar10() -> dict[str, bytes]:
    """CIFAR-10's pickles with few images of random pixels."""
    random = numpy.random.default_rng(0)
    files = {"batches.meta": pickle.dumps({"label_names": list("abcdefghij")})}
    for name, num in ({f"data_batch_{number}": 50 for number in range(1, 6)} | {"test_batch": 60}).items():
        pixels = random.integers(0, 256, (num, 3 * 32 * 32), dtype=numpy.uint8)
        files[name] = pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(num)]})
    return files


@pytest.fixture
def small_official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[TorchvisionImages]], Path]:
    """A function that writes 250 and 60 images, makes a dataset's class expect them, and returns their root."""

    def write(kind: type[TorchvisionImages]) -> Path:
        root, files = tmp_path / "small", {}
        is_cifar = kind is CIFAR10
        contents = small_cifar10() if is_cifar else fabricated_mnist.contents(250, 60, fabricated_mnist.random_pixels)
        md5 = {name: hashlib.md5(data, usedforsecurity=False).hexdigest() for name, data in contents.items()}
        if is_cifar:  # torchvision verifies checksums, too
            for part in ("train_list", "test_list"):
                checksums = [[name, md5[name]] for name, _ in getattr(datasets.CIFAR10, part)]
                monkeypatch.setattr(datasets.CIFAR10, part, checksums)
            monkeypatch.setitem(datasets.CIFAR10.meta, "md5", md5["batches.meta"])
        for path, expected in kind.files.items():
            name = Path(path).name
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(contents[name])
            files[path] = expected and md5[name]
        monkeypatch.setattr(kind, "files", files)
        return root

    return write


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function that makes this process take a rank among a number of ranks."""

    def be(rank: int, world: int) -> None:
        for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": world}.items():
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)

    return be
