"""The files of a run, which may be anybody's: read without trusting what is in them, and replaced atomically.

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
SWEEPS = Path("outputs/sweeps")  # where hydra.sweep.dir puts them
_MAX_BYTES = 2**28  # of a file that is read


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within, a file is read: what fails is a UserError of one line."""
    try:
        if os.path.lexists(path):
            if not path.is_file():  # reading a pipe or a device may never end
                raise OSError("it is not a file")
            if path.stat().st_size > _MAX_BYTES:
                raise OSError("it is too large")
        yield
    # zipfile raises NotImplementedError and RuntimeError for what it does not support, and zlib has its own error.
    except Exception as error:
        said = why(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read: {cut(said, 200) or type(error).__name__}") from error


@contextlib.contextmanager
def replacing(path: Path, option: str = "") -> Iterator[BinaryIO]:
    """Open a file that becomes `path` when the block ends, as `atomic_write` does; its folder is made if it is missing.

    Raises WriteError, which begins with the option that has named the file, if one has.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            yield file
    except OSError as error:
        named = f"{option}: '{path}'" if option else path
        raise WriteError(f"{named} cannot be written: {why(error)}") from error


def read(run_dir: Path) -> dict[str, Any]:
    """The record of a run.

    Raises:
        UserError: if there is no record, it cannot be read, or its schema is another one.
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


def read_if_there(run_dir: Path) -> dict[str, Any]:
    """The record of a run, as `read`; empty where there is none."""
    return read(run_dir) if os.path.exists(run_dir / FILE) else {}


def run_dirs(folder: Path) -> list[Path]:
    """The folders in and below a folder that hold a record, by their numbers. Raises UserError if it is no folder."""
    if not os.path.isdir(folder):  # also false for a name that no folder can have
        raise UserError(f"{folder}: no such folder")
    places = []
    for path, children, files in os.walk(folder):
        # Launchers keep their jobs in hidden folders, and a sweep that is repeated sets earlier runs aside.
        children[:] = [child for child in children if not child.startswith(".") and not is_set_aside(child)]
        if FILE in files:
            places.append(Path(path))
            children.clear()
    return sorted(places, key=lambda path: [(int(part), "") if part.isdecimal() else (-1, part) for part in path.parts])


def sweep_folder(name: str | Path, option: str, *more: Path) -> Path:
    """The folder of a sweep that is named by its path, or as `last`: the one with the newest record, in `more` folders, too.

    Raises:
        UserError: if there is no sweep; a path is returned as it is.
    """
    if str(name) != "last" or os.path.exists(name):
        return Path(name)
    written: list[tuple[float, Path]] = []
    for sweep in (sweep for folder in (SWEEPS, *more) for sweep in folder.glob("*")):
        with contextlib.suppress(OSError, UserError):  # a file, or it was removed meanwhile
            written += [((place / FILE).stat().st_mtime, sweep) for place in run_dirs(sweep)]
    if not written:
        raise UserError(f"{option}: got 'last', and there is no sweep in {' or '.join(map(str, (SWEEPS, *more)))}")
    return max(written)[1]


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


def optimized(record: dict[str, Any]) -> float | None:
    """The value of `optimized_metric`: a metric or a value of `throughput`; None if the run does not have it.

    A LightningModule of one's own may call `val/loss` `val_loss` or `valid/loss`.
    """
    name = record["config"].get("optimized_metric")
    metrics = {staged(key): value for key, value in record.get("metrics", {}).items()}
    value = metrics.get(staged(str(name)), record.get("throughput", {}).get(name))
    return value if isinstance(value, int | float) else None
