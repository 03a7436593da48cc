"""Files in MNIST's official IDX format that hold other images: random pixels, or digits rendered on this machine.

They are not MNIST: `data=mnist` verifies md5s and refuses them. Tests read them where the real files are not needed.
"""

from collections.abc import Callable
from pathlib import Path

import numpy

Images = Callable[[int, int], tuple[numpy.ndarray, numpy.ndarray]]  # (num, seed) → images (N, 28, 28), labels (N,)


def random_pixels(num: int, seed: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Images of random pixels; the labels go from 0 to 9 in turn."""
    images = numpy.random.default_rng(seed).integers(0, 256, (num, 28, 28), dtype=numpy.uint8)
    return images, numpy.arange(num, dtype=numpy.uint8) % 10


def rendered(num: int, seed: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Rendered digits, which a model can learn."""
    from batchscope.data.digits import render_digits

    images, labels = render_digits(num, seed)
    return images[:, 0].numpy(), labels.numpy().astype(numpy.uint8)


def contents(num_train: int, num_test: int, images: Images = rendered) -> dict[str, bytes]:
    """MNIST's four files by name. IDX: two zeros, the type of bytes, the number of dimensions, their sizes, the content."""
    files = {}
    for seed, (prefix, num) in enumerate((("train", num_train), ("t10k", num_test))):
        for kind, array in zip(("images-idx3", "labels-idx1"), images(num, seed), strict=True):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            files[f"{prefix}-{kind}-ubyte"] = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
    return files


def write(root: Path, num_train: int, num_test: int) -> Path:
    """Write the four files to `root/MNIST/raw`; returns root."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in contents(num_train, num_test).items():
        (raw / name).write_bytes(content)
    return root
