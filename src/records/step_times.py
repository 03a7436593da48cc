"""The step times of a run (`steps.npz`): each measured step, in the windows in which the steps were measured.

A window is a short bout of successive steps, with what others took of the processor meanwhile. Comparisons compare windows.
"""

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from .read import reading, replacing

FILE = "steps.npz"
_FLOATS = NDArray[numpy.float64]
# The columns with a row for each window, and all of them, with their types.
_OF_WINDOW = {"window": "i8", "pass_": "i8", "start_unix": "f8", "others_share": "f8", "disturbed": "f8"}
_DTYPES = {"step_s": "f4", **_OF_WINDOW}


@dataclass
class StepTimes:
    """The columns of the file. N steps, W windows. NaN stands for what is unknown."""

    step_s: NDArray[numpy.float32]  # (N,) seconds of each whole-batch step; where sizes vary, as of one
    window: NDArray[numpy.int64]  # (W,) index in `step_s` of each window's first step; a window may have none
    pass_: NDArray[numpy.int64]  # (W,) of a sweep; -1 outside of one
    start_unix: _FLOATS  # (W,) seconds since 1970 at which the window began
    others_share: _FLOATS  # (W,) of the processor, by which others may have slowed the run
    disturbed: _FLOATS  # (W,) 1 if the window was, by the rule in hardware/processor.py, else 0

    def means(self) -> _FLOATS:
        """The mean step of each window in seconds, shape (W,), hiccups included; NaN for a window without a step."""
        steps = self.step_s.astype(float)  # the sum of large float32 is infinite
        parts = numpy.split(steps, self.window[1:]) if len(self.window) else []
        return numpy.array([numpy.nanmean(part) if numpy.isfinite(part).any() else math.nan for part in parts])


def write_step_times(folder: Path, times: StepTimes) -> None:
    """Write the file into a run's folder atomically. Raises WriteError."""
    columns: dict[str, Any] = {name: numpy.asarray(getattr(times, name), dtype) for name, dtype in _DTYPES.items()}
    with replacing(folder / FILE) as file:
        numpy.savez_compressed(file, **columns)


def read_step_times(folder: Path) -> StepTimes | None:
    """The step times of a run; None if it left none.

    Raises:
        UserError: if the file cannot be read, or is not of this kind. Nothing in it is unpickled.
    """
    path = folder / FILE
    with reading(path):
        if not path.exists():
            return None
        with zipfile.ZipFile(path), numpy.load(path, allow_pickle=False) as archive:
            columns: dict[str, Any] = {name: archive[name] for name in _DTYPES}
        _check(columns)
        return StepTimes(**columns)


def _check(columns: dict[str, Any]) -> None:
    """Raise ValueError for columns that are not those of a run's steps."""
    for name, dtype in _DTYPES.items():
        if columns[name].dtype != dtype:
            raise ValueError(f"{name} has another type")
    steps, starts = columns["step_s"], columns["window"]
    if steps.ndim != 1:
        raise ValueError("its columns have other shapes")
    if starts.ndim != 1 or any(columns[name].shape != starts.shape for name in _OF_WINDOW):
        raise ValueError("its columns have different lengths")
    borders = [0, *starts.tolist(), len(steps)]
    if borders != sorted(borders) or (len(steps) and (not len(starts) or starts[0] != 0)):
        raise ValueError("its windows are not in order")
