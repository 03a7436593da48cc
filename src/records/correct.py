"""Which samples of the test set a run answered right (`correct.npy`): a bit each, in the order of the test set.

Two runs on the same test set are compared by the samples that only one of them answers right.
"""

from pathlib import Path

import numpy
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from .read import reading, replacing

FILE = "correct.npy"


def write_correct(folder: Path, correct: NDArray[numpy.bool_]) -> None:
    """Write the file into a run's folder atomically; `correct` has shape (N,). Raises WriteError."""
    with replacing(folder / FILE) as file:
        numpy.save(file, numpy.packbits(correct))


def read_correct(folder: Path, samples: int, accuracy: float) -> NDArray[numpy.bool_] | None:
    """Return which samples a run answered right, shape (N,); None if it left no file.

    Args:
        folder: the folder of the run.
        samples: N, from its record.
        accuracy: the accuracy on these samples, from its record.

    Raises:
        UserError: if the file cannot be read, or does not match the record. Nothing in it is unpickled.
    """
    path = folder / FILE
    with reading(path):
        if not path.exists():
            return None
        packed = open_memmap(path, mode="r")  # allocates no more than the size of the file
        if packed.dtype != numpy.uint8 or packed.shape != (-(-samples // 8),):
            raise ValueError("it is not of the test in the record")
        correct = numpy.unpackbits(packed, count=samples).astype(bool)
        if correct.sum() != round(accuracy * samples):
            raise ValueError("it has another accuracy than the record")
        return correct
