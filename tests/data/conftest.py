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
from batchscope.data.torchvision_images import ExpectedFile, TorchvisionImages
from tests.support import fabricated_mnist

NUM_TRAIN, NUM_TEST = 250, 60


def small_cifar10() -> dict[str, bytes]:
    """CIFAR-10's pickles with few images of random pixels."""
    random = numpy.random.default_rng(0)
    sizes = {f"data_batch_{number}": NUM_TRAIN // 5 for number in range(1, 6)} | {"test_batch": NUM_TEST}
    files = {"batches.meta": pickle.dumps({"label_names": list("abcdefghij")})}
    for name, num in sizes.items():
        pixels = random.integers(0, 256, (num, 3 * 32 * 32), dtype=numpy.uint8)
        files[name] = pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(num)]})
    return files


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def small_official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[TorchvisionImages]], Path]:
    """A function of a dataset's class: it writes small files, makes the class expect them, and returns their root."""

    def write(kind: type[TorchvisionImages]) -> Path:
        root = tmp_path / "small"
        if kind is CIFAR10:
            contents = small_cifar10()
            for part in ("train_list", "test_list"):  # torchvision verifies them, too
                known = [[name, md5(contents[name])] for name, _ in getattr(datasets.CIFAR10, part)]
                monkeypatch.setattr(datasets.CIFAR10, part, known)
            monkeypatch.setitem(datasets.CIFAR10.meta, "md5", md5(contents["batches.meta"]))
        else:
            contents = fabricated_mnist.contents(NUM_TRAIN, NUM_TEST, fabricated_mnist.random_pixels)
        files = {}
        for path, expected in kind.files.items():
            content = contents[Path(path).name]
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
            files[path] = ExpectedFile(expected.size and len(content), expected.md5 and md5(content))
        monkeypatch.setattr(kind, "files", files)
        return root

    return write


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function of a rank and the number of ranks: this process is taken for that one."""

    def be(rank: int, world: int) -> None:
        for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": world}.items():
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)

    return be
