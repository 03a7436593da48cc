"""Random bytes in the place of data files: one line that says what is wrong, and the files left as they were."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchscope.data.cifar10 import CIFAR10
from batchscope.data.digits import cached_digits, render_digits
from batchscope.data.mnist import MNIST, FashionMNIST
from batchscope.data.torchvision_images import TorchvisionImages
from tests.support.fuzzing import budget, damage, refused_or_fine


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10])
def test_random_bytes_as_an_official_file(
    small_official: Callable[[type[TorchvisionImages]], Path], kind: type[TorchvisionImages]
) -> None:
    root = small_official(kind)
    good = {path: (root / path).read_bytes() for path in kind.files}

    def load() -> None:
        data = kind(root=str(root), batch_size=8, num_val=20)
        data.check()
        data.prepare_data()
        data.setup("fit")
        data.setup("test")

    for dice in budget(kind.__name__):
        path = dice.choice(list(good))
        bad = _reshaped(damage(good[path], dice), good[path], dice)
        (root / path).write_bytes(bad)
        refused_or_fine(load, (path, bad[:40]))
        assert (root / path).read_bytes() == bad
        (root / path).write_bytes(good[path])
    assert {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} == set(good)


def _reshaped(bad: bytes, good: bytes, dice: random.Random) -> bytes:
    """Half of the time as long as the good file: a wrong length alone is found at once."""
    return bad if dice.random() < 0.5 else (bad + good)[: len(good)]


def test_random_bytes_as_rendered_digits_that_were_kept(tmp_path: Path) -> None:
    want = render_digits(20, seed=1)
    cached_digits(tmp_path, 20, seed=1)
    (path,) = (tmp_path / "digits").iterdir()
    good = path.read_bytes()
    for dice in budget("digits"):
        path.write_bytes(damage(good, dice))
        images, labels = cached_digits(tmp_path, 20, seed=1)
        assert (images.shape, images.dtype, labels.dtype) == (want[0].shape, torch.uint8, torch.int64)
        assert 0 <= labels.min() <= labels.max() <= 9
