"""Official datasets in small: files in torchvision's layout, written by the tests."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from torchvision import datasets

from batchscope.data.cifar10 import CIFAR10
from batchscope.data.mnist import MNIST, FashionMNIST
from batchscope.data.torchvision_images import Expected, TorchvisionImages

NUM_TRAIN, NUM_TEST = 250, 60


def idx(array: numpy.ndarray) -> bytes:
    """An array of bytes in the format of MNIST's files."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def small_mnist_files() -> dict[str, bytes]:
    """MNIST's four files with few images of random pixels; every label in both sets."""
    random = numpy.random.default_rng(0)
    files = {}
    for prefix, num in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        files[f"{prefix}-images-idx3-ubyte"] = idx(random.integers(0, 256, (num, 28, 28), dtype=numpy.uint8))
        files[f"{prefix}-labels-idx1-ubyte"] = idx(numpy.arange(num, dtype=numpy.uint8) % 10)
    return files


def small_cifar10_files() -> dict[str, bytes]:
    """CIFAR-10's pickles with few images of random pixels; `data` is red, green and blue in turn."""
    random = numpy.random.default_rng(0)
    sizes = {name: NUM_TRAIN // 5 for name, _ in datasets.CIFAR10.train_list}
    sizes |= {name: NUM_TEST for name, _ in datasets.CIFAR10.test_list}
    files = {}
    for name, num in sizes.items():
        pixels = random.integers(0, 256, (num, 3 * 32 * 32), dtype=numpy.uint8)
        files[name] = pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(num)]})
    return files | {datasets.CIFAR10.meta["filename"]: pickle.dumps({"label_names": list("abcdefghij")})}


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def small_official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[TorchvisionImages]], Path]:
    """Call it with a dataset's class: it writes small files, has the class expect them, and gives their root."""

    def write(kind: type[TorchvisionImages]) -> Path:
        root = tmp_path / "small"
        if issubclass(kind, CIFAR10):
            contents = small_cifar10_files()
            for part in ("train_list", "test_list"):
                known = [[name, md5(contents[name])] for name, _ in getattr(datasets.CIFAR10, part)]
                monkeypatch.setattr(datasets.CIFAR10, part, known)
            meta = {**datasets.CIFAR10.meta, "md5": md5(contents[datasets.CIFAR10.meta["filename"]])}
            monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
        elif issubclass(kind, MNIST | FashionMNIST):
            contents = small_mnist_files()
        else:
            pytest.fail(f"{kind.__name__} reads official files: teach this fixture to write them in small")
        files = {}
        for path, expected in kind.files.items():
            content = contents[Path(path).name]
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
            files[path] = Expected(expected.size and len(content), expected.md5 and md5(content))
        monkeypatch.setattr(kind, "files", files)
        return root

    return write
