"""Reading `run.json`, without trusting what is in it. A record of another schema is refused."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError, cut
from ..files import is_set_aside, why
from .metrics import staged

FILE = "run.json"
SCHEMA = 3  # of the records that this version writes and reads


class DamagedRecordError(UserError):
    """A run.json that is empty, torn, or not a record."""


def read(run_dir: Path) -> dict[str, Any]:
    """The record of a run.

    Raises:
        UserError: if there is no record, it cannot be read, or its schema is another one.
        DamagedRecordError: if the content of the file is not a record.
    """
    path = run_dir / FILE
    if not os.path.lexists(path):
        raise UserError(f"{run_dir}: no {FILE} in it")
    record = load_json(path)
    if not isinstance(record, dict):
        raise DamagedRecordError(f"{path}: cannot be read: it is not the record of a run")
    if record.get("schema", SCHEMA) != SCHEMA:
        found = repr(record["schema"])[:20]
        raise UserError(f"{path}: is of another version: its schema is {found}, and this one reads {SCHEMA}")
    return record


def run_dirs(folder: Path) -> list[Path]:
    """The folders in and below a folder that hold a record, in the order of their numbers. Raises UserError if it is none."""
    if not os.path.isdir(folder):  # also false for a name that no folder can have
        raise UserError(f"{folder}: no such folder")
    found = []
    for path, children, files in os.walk(folder):
        # Launchers keep their jobs in hidden folders, and a sweep that is repeated sets earlier runs aside.
        children[:] = [child for child in children if not child.startswith(".") and not is_set_aside(child)]
        if FILE in files:
            found.append(Path(path))
            children.clear()
    return sorted(found, key=_order)


def _order(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.parts]


def load_json(path: Path, max_bytes: int = 2**28) -> Any:
    """What is in a JSON file, which may be anybody's.

    Raises:
        UserError: if the file cannot be read.
        DamagedRecordError: if its content is no JSON.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise UserError(f"{path}: cannot be read: it is not a file")
        if path.stat().st_size > max_bytes:
            raise UserError(f"{path}: cannot be read: it is too large")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why(error)}") from error
    except (ValueError, RecursionError) as error:
        reason = cut(" ".join(str(error).split()), 200)
        raise DamagedRecordError(f"{path}: cannot be read: {reason}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within, a file beside a record is read, which may be anybody's: whatever fails is a UserError of one line."""
    try:
        if os.path.lexists(path) and not path.is_file():  # reading a pipe or a device may never end
            raise ValueError("it is not a file")
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why(error)}") from error
    # zipfile raises NotImplementedError and RuntimeError for what it does not support, and zlib has its own error.
    except Exception as error:
        reason = cut(" ".join(str(error).split()), 200) or type(error).__name__
        raise UserError(f"{path}: cannot be read: {reason}") from error


def refuse_used(run_dir: Path) -> None:
    """Raise UserError if the folder already holds a run that is not merely planned."""
    try:
        planned = (run_dir / FILE).exists() and read(run_dir).get("status") == "planned"
    except UserError:
        planned = False
    if not planned and ((run_dir / FILE).exists() or any(run_dir.glob("checkpoints/*.ckpt"))):
        raise UserError(f"hydra.run.dir: {os.path.relpath(run_dir)} already holds a run; choose another")


def optimized(record: dict[str, Any]) -> float | None:
    """The value of `optimized_metric`: a metric or a value of `throughput`; None if the run does not have it.

    A LightningModule of one's own may call `val/loss` `val_loss`.
    """
    name = record["config"].get("optimized_metric")
    metrics = {staged(key): value for key, value in record.get("metrics", {}).items()}
    found = metrics.get(staged(str(name)), record.get("throughput", {}).get(name))
    return found if isinstance(found, int | float) else None
