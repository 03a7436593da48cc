"""A sweep's folder: whose it is, which of its runs are kept when the sweep is started again."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import UserError
from ..record import FILE, plan, read
from ..recovery.resume import claim as claim_run

# A run that ended in one of these ways is not run again: that it did not fit is a result, too.
KEPT = ("finished", "out_of_memory")
UNFINISHED = ("running", "interrupted")
_LOCK = ".lock"


@contextmanager
def claim(sweep_dir: Path) -> Iterator[None]:
    """Hold a sweep's folder, so that no second process runs the same sweep in it at the same time.

    Raises:
        UserError: if another process holds it, or it cannot be made.
    """
    try:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(sweep_dir / _LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise UserError(f"hydra.sweep.dir: a sweep is being run in {sweep_dir} right now") from None
    except OSError as error:
        raise UserError(f"hydra.sweep.dir: {sweep_dir} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def refuse_other(sweep_dir: Path, configs: list[dict[str, Any]]) -> None:
    """Raise UserError if the folder holds the runs of a sweep other than the one with these configurations."""
    if (sweep_dir / FILE).exists():
        raise UserError(f"hydra.sweep.dir: {sweep_dir} holds a single run; choose another folder")
    for number, config in enumerate(configs):
        run_dir = sweep_dir / str(number)
        if (run_dir / FILE).exists():
            _refuse_different(run_dir, config)


def keep_or_plan(run_dir: Path, config: dict[str, Any], **facts: Any) -> dict[str, Any] | None:
    """The record of a run that need not be run again; otherwise None, and the folder is ready for it.

    A killed or interrupted try that has left a checkpoint will go on from it; what any other has left is removed.

    Raises:
        UserError: if the folder holds a run with another configuration, or one that is going on.
    """
    if (run_dir / FILE).exists():
        _refuse_different(run_dir, config)
        record = read(run_dir)
        if record.get("status") in KEPT:
            return record
        if record.get("status") in UNFINISHED and list(run_dir.glob("checkpoints/*.ckpt")):
            return None
        with claim_run(run_dir):  # where a launcher started it, it may have outlived its sweep
            shutil.rmtree(run_dir)
    plan(run_dir, config=config, **facts)
    return None


def statuses(sweep_dir: Path) -> list[str]:
    """How every run of a sweep ended."""
    return [str(record.get("status")) for record in _records(sweep_dir)]


def _records(sweep_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(sweep_dir.rglob(FILE)):
        with suppress(UserError):
            yield read(path.parent)


def _refuse_different(run_dir: Path, config: dict[str, Any]) -> None:
    there = read(run_dir).get("config")
    known = isinstance(there, dict)
    difference = _difference(there, config, str(there.get("run_dir"))) if known else "cannot be compared"
    if difference:
        raise UserError(
            f"hydra.sweep.dir: {os.path.relpath(run_dir)} holds a run of another sweep ({difference}); "
            f"choose another folder"
        )


def _difference(there: Any, here: Any, place: str, path: str = "") -> str:
    """The first option that two configurations do not share, in words; where the run lies does not count."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [key for key in dict.fromkeys([*there, *here]) if path or key not in ("run_dir", "resume")]
        found = (_difference(there.get(key), here.get(key), place, f"{path}.{key}" if path else key) for key in keys)
        return next(filter(None, found), "")
    if there == here or (isinstance(there, str) and there.startswith(place)):
        return ""
    return f"{path} is {there!r} there and {here!r} here"
