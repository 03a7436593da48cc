"""The step times of a run (`steps.npz`): each measured step, in the windows in which the steps were measured.

A window is a short bout of successive steps, with the load of other programs meanwhile. Comparisons compare windows.
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
# The types of the columns with a row for each window, and of all columns.
_WINDOW_DTYPES = {"window": "i8", "pass_": "i8", "start_unix": "f8", "others_share": "f8", "disturbed": "f8"}
_DTYPES = {"step_s": "f4", **_WINDOW_DTYPES}


@dataclass
class StepTimes:
    """The columns of the file. N steps, W windows. NaN stands for what is unknown."""

    step_s: NDArray[numpy.float32]  # (N,) seconds of each step with a whole batch; where sizes vary, scaled to one
    window: NDArray[numpy.int64]  # (W,) index in `step_s` of each window's first step; a window may have none
    pass_: NDArray[numpy.int64]  # (W,) pass of the sweep; -1 outside a sweep
    start_unix: _FLOATS  # (W,) seconds since 1970 at which the window began
    others_share: _FLOATS  # (W,) share of the processor by which others may have slowed the run
    disturbed: _FLOATS  # (W,) 1 if the window is disturbed by the rule in hardware/processor.py, else 0

    def means(self) -> _FLOATS:
        """Return the mean step of each window in seconds, shape (W,), hiccups included; NaN for a window without a step."""
        steps = self.step_s.astype(float)  # a sum of large float32 may be infinite
        windows = numpy.split(steps, self.window[1:]) if len(self.window) else []
        return numpy.array([numpy.nanmean(times) if numpy.isfinite(times).any() else math.nan for times in windows])


def write_step_times(folder: Path, times: StepTimes) -> None:
    """Write the file into a run's folder atomically. Raises WriteError."""
    columns: dict[str, Any] = {name: numpy.asarray(getattr(times, name), dtype) for name, dtype in _DTYPES.items()}
    with replacing(folder / FILE) as file:
        numpy.savez_compressed(file, **columns)


def read_step_times(folder: Path) -> StepTimes | None:
    """Return the step times of a run; None if it left no file.

    Raises:
        UserError: if the file cannot be read, or has other content. Nothing in it is unpickled.
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
    """Raise ValueError for columns that do not have the types, shapes and order of StepTimes."""
    for name, dtype in _DTYPES.items():
        if columns[name].dtype != dtype:
            raise ValueError(f"{name} has another type")
    steps, starts = columns["step_s"], columns["window"]
    if steps.ndim != 1:
        raise ValueError("its columns have other shapes")
    if starts.ndim != 1 or any(columns[name].shape != starts.shape for name in _WINDOW_DTYPES):
        raise ValueError("its columns have different lengths")
    borders = [0, *starts.tolist(), len(steps)]
    if borders != sorted(borders) or (len(steps) and (not len(starts) or starts[0] != 0)):
        raise ValueError("its windows are not in order")
