"""A sweep's folder: whose it is, which of its runs are kept when the sweep is started again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..checkpointing.resume import lock_run_dir
from ..errors import UserError
from ..files import LOCK, WriteError, is_set_aside, lock_folder, refuse_links, set_aside, why
from ..records.read import FILE, DamagedRecordError, read
from ..records.run_record import close, plan

# A run that ended in one of these ways is not run again: that it did not fit is a result, too.
KEPT = ("finished", "out_of_memory")
# Ended from outside: such a run goes on where it has a checkpoint.
UNFINISHED = ("running", "interrupted", "killed")
# What a sweep, Hydra and its plugins write directly in the sweep's folder.
_WRITTEN = ("[0-9]*", "report", LOCK, ".submitit", "multirun.yaml", "optimization_results.yaml")


@contextmanager
def lock_sweep_dir(sweep_dir: Path) -> Iterator[None]:
    """Hold a sweep's folder, so that no second process runs the same sweep in it at the same time.

    Raises:
        UserError: if another process holds it, it cannot be made, or a link in it leads elsewhere.
    """
    refuse_links(sweep_dir, "the sweep's folder", written=_WRITTEN)
    with lock_folder(sweep_dir, "hydra.sweep.dir", f"a sweep is being run in {sweep_dir} right now"):
        yield


def refuse_other(sweep_dir: Path, configs: list[dict[str, Any]]) -> None:
    """Raise UserError if the folder holds the runs of a sweep other than the one with these configurations."""
    if (sweep_dir / FILE).exists():
        raise UserError(f"hydra.sweep.dir: {sweep_dir} holds a single run; choose another folder")
    for number, config in enumerate(configs):
        run_dir = sweep_dir / str(number)
        with suppress(DamagedRecordError):  # which is set aside
            if (run_dir / FILE).exists():
                _refuse_different(run_dir, read(run_dir), config)


def keep_or_plan(run_dir: Path, config: dict[str, Any], **facts: Any) -> dict[str, Any] | None:
    """The record of a run that need not be run again; otherwise None, and the folder is ready for it.

    A run that ended from outside and has left a checkpoint will go on from it. One that failed by itself would fail
    again, and is kept as it is. What any other has left is set aside.

    Raises:
        UserError: if the folder holds a run with another configuration, or one that is going on.
    """
    if not (run_dir / FILE).exists() and not _has_checkpoint(run_dir):
        plan(run_dir, config=config, **facts)
        return None
    record = _read(run_dir)
    if record:
        _refuse_different(run_dir, record, config)
    if record.get("status") in KEPT:
        return record
    with lock_run_dir(run_dir, option="hydra.sweep.dir"):  # where a launcher started it, it may have outlived its sweep
        record = _read(run_dir)
        status = record.get("status")
        if status in (*KEPT, "failed"):
            return record
        if status in UNFINISHED and _has_checkpoint(run_dir):
            if status == "running":
                close(run_dir, "killed", "ended without a word")
            return None
        if status != "planned":
            _set_aside(run_dir)
        plan(run_dir, config=config, **facts)
    return None


def _has_checkpoint(run_dir: Path) -> bool:
    return any(run_dir.glob("checkpoints/*.ckpt"))


def _read(run_dir: Path) -> dict[str, Any]:
    """The record; empty if there is none, or none that can be read."""
    if not (run_dir / FILE).exists():
        return {}
    try:
        return read(run_dir)
    except DamagedRecordError:
        return {}


def _set_aside(run_dir: Path) -> None:
    """Nothing of what a run has left is removed; reports and exit codes leave it out."""
    try:
        place = set_aside(run_dir)
    except OSError as error:
        raise WriteError(f"hydra.sweep.dir: {run_dir} cannot be renamed: {why(error)}") from error
    print(f"{os.path.relpath(run_dir)} begins anew; what was in it is now in {os.path.relpath(place)}", flush=True)


def statuses(sweep_dir: Path) -> list[str]:
    """How every run of a sweep ended."""
    return [str(record.get("status")) for record in _records(sweep_dir)]


def _records(sweep_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(sweep_dir.rglob(FILE)):
        with suppress(UserError):
            if not any(map(is_set_aside, path.relative_to(sweep_dir).parts)):
                yield read(path.parent)


def _refuse_different(run_dir: Path, record: dict[str, Any], config: dict[str, Any]) -> None:
    there = record.get("config")
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
    own = isinstance(there, str) and place and (there == place or there.startswith(place + os.sep))
    if there == here or own:
        return ""
    return f"{path} is {there!r} there and {here!r} here"
