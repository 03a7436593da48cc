"""Reads the files of a run without trusting their content, and replaces files atomically.

A `run.json` of another schema is refused.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .._system import relative
from ..errors import UserError, cut
from ..files import WriteError, atomic_write, is_set_aside, why
from .metrics import staged

FILE = "run.json"
SCHEMA = 3  # of the records that this version writes and reads
SWEEPS = Path("outputs/sweeps")  # where hydra.sweep.dir puts sweeps
_MAX_BYTES = 2**28  # a larger file is not read


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any failure to read a file in the block into a UserError of one line."""
    try:
        if os.path.lexists(path):
            if not path.is_file():  # a read from a pipe or a device may block forever
                raise OSError("it is not a file")
            if path.stat().st_size > _MAX_BYTES:
                raise OSError("it is too large")
        yield
    # Any exception: zipfile raises NotImplementedError and RuntimeError, and zlib has its own error.
    except Exception as error:
        message = why(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read: {cut(message, 200) or type(error).__name__}") from error


@contextlib.contextmanager
def replacing(path: Path, option: str = "") -> Iterator[BinaryIO]:
    """Open a file that becomes `path` when the block ends, as `atomic_write` does; create its folder if it is missing.

    Raises WriteError, which begins with `option`, the option that names the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            yield file
    except OSError as error:
        subject = f"{option}: '{path}'" if option else path
        raise WriteError(f"{subject} cannot be written: {why(error)}") from error


def read(run_dir: Path) -> dict[str, Any]:
    """Return the record of a run.

    Raises:
        UserError: if the record is missing, cannot be read, or has another schema.
    """
    path = run_dir / FILE
    if not os.path.lexists(path):
        raise UserError(f"{run_dir}: no {FILE} in it")
    with reading(path):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise TypeError("it is not the record of a run")
    if record.get("schema", SCHEMA) != SCHEMA:
        schema = repr(record["schema"])[:20]
        raise UserError(f"{path}: is of another version: its schema is {schema}, and this one reads {SCHEMA}")
    return record


def read_or_empty(run_dir: Path) -> dict[str, Any]:
    """Return the record of a run, as `read` does; empty if there is none."""
    return read(run_dir) if os.path.exists(run_dir / FILE) else {}


def run_dirs(folder: Path) -> list[Path]:
    """Return the folders in and below a folder that have a record, in numerical order. Raises UserError if it is no folder."""
    if not os.path.isdir(folder):  # also False for an impossible name, without an exception
        raise UserError(f"{folder}: no such folder")
    dirs = []
    for path, children, files in os.walk(folder):
        # Launchers keep their jobs in hidden folders, and a repeated sweep sets earlier runs aside.
        children[:] = [child for child in children if not child.startswith(".") and not is_set_aside(child)]
        if FILE in files:
            dirs.append(Path(path))
            children.clear()
    return sorted(dirs, key=lambda path: [(int(part), "") if part.isdecimal() else (-1, part) for part in path.parts])


def sweep_folder(name: str | Path, option: str, *more: Path) -> Path:
    """Return the folder of a sweep by its path, or for `last` that with the newest record, also in the folders `more`.

    Raises:
        UserError: for `last`, if there is no sweep. A path is not checked.
    """
    if str(name) != "last" or os.path.exists(name):
        return Path(name)
    times: list[tuple[float, Path]] = []
    for sweep in (sweep for folder in (SWEEPS, *more) for sweep in folder.glob("*")):
        with contextlib.suppress(OSError, UserError):  # a file, or a folder that was just removed
            times += [((run_dir / FILE).stat().st_mtime, sweep) for run_dir in run_dirs(sweep)]
    if not times:
        raise UserError(f"{option}: got 'last', and there is no sweep in {' or '.join(map(str, (SWEEPS, *more)))}")
    return max(times)[1]


def refuse_used(run_dir: Path) -> None:
    """Raise UserError if the folder already holds a run that is not merely planned."""
    has_record = (run_dir / FILE).exists()
    with contextlib.suppress(UserError):
        if has_record and read(run_dir).get("status") == "planned":
            return
    if has_record or has_checkpoint(run_dir):
        raise UserError(f"hydra.run.dir: {relative(run_dir)} already holds a run; choose another")


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run has left a checkpoint."""
    return any(run_dir.glob("checkpoints/*.ckpt"))


def optimized_value(record: dict[str, Any]) -> float | None:
    """Return the value of `optimized_metric`, a metric or a key of `throughput`; None if the run does not have it.

    A LightningModule may log `val/loss` as `val_loss` or `valid/loss`.
    """
    name = record["config"].get("optimized_metric")
    metrics = {staged(key): value for key, value in record.get("metrics", {}).items()}
    value = metrics.get(staged(str(name)), record.get("throughput", {}).get(name))
    return value if isinstance(value, int | float) else None
