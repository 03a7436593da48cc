"""A sweep's folder: which sweep it holds, and which of its runs are kept when the sweep is started again."""

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from .._system import relative
from ..checkpointing.resume import lock_run_dir
from ..errors import UserError
from ..files import LOCK, lock_folder, refuse_links, set_aside, writing
from ..options.purpose import OF_REPORTS, purpose_of
from ..options.tree import flatten
from ..options.types import Purpose
from ..records.read import FILE, has_checkpoint, read, read_if_there, run_dirs
from ..records.run_record import change, close, plan

# A run that ended in one of these ways is not run again: that it did not fit is a result, too.
KEPT = ("finished", "out_of_memory")
_ENDED = (*KEPT, "failed", "not_finite")  # nor one that failed by itself
# Ended from outside: such a run is resumed where it has a checkpoint.
UNFINISHED = ("running", "interrupted", "killed")
# What a sweep, Hydra and its plugins write directly in the sweep's folder.
_WRITTEN = ("[0-9]*", "report", LOCK, ".submitit", "multirun.yaml", "optimization_results.yaml")
_NAMED_BY = "hydra.sweep.dir"


def lock_sweep_dir(sweep_dir: Path) -> AbstractContextManager[None]:
    """Hold a sweep's folder against a second process; UserError if one holds it, or a link in it leads elsewhere."""
    refuse_links(sweep_dir, "the sweep's folder", written=_WRITTEN)
    return lock_folder(sweep_dir, _NAMED_BY, f"a sweep is being run in {sweep_dir} right now")


def refuse_other(sweep_dir: Path, configs: list[dict[str, Any]]) -> None:
    """Raise UserError if the folder holds the runs of a sweep other than the one with these configurations."""
    if os.path.exists(sweep_dir / FILE):
        raise UserError(f"{_NAMED_BY}: {sweep_dir} holds a single run; choose another folder")
    for job, config in enumerate(configs):
        _refuse_different(sweep_dir / str(job), config)


def keep_or_plan(run_dir: Path, config: dict[str, Any], **facts: Any) -> dict[str, Any] | None:
    """The record of a run that need not be run again; otherwise None, and the folder is ready for the run.

    A run that was ended from outside and has left a checkpoint will be resumed from it. What any other run that has not
    ended by itself has left is set aside. UserError if the folder holds a run with another configuration, or one that is
    trained by another process.
    """
    _refuse_different(run_dir, config)
    with lock_run_dir(run_dir, option=_NAMED_BY):  # a run that a launcher started may outlive its sweep
        record, may_resume = read_if_there(run_dir), has_checkpoint(run_dir)
        status = record.get("status")
        if status in _ENDED:
            # The options that a report takes from the records have new values.
            asked = {key: config[key] for key in OF_REPORTS if key in config}
            if not asked.items() <= record["config"].items():
                change(run_dir, config={**record["config"], **asked})
            return read(run_dir)
        if status in UNFINISHED and may_resume:
            if status == "running":
                close(run_dir, "killed", "ended without a word")
            return None
        if status != "planned" and (record or may_resume):
            with writing(_NAMED_BY, run_dir):
                aside = relative(set_aside(run_dir))
            print(f"{relative(run_dir)} begins anew; what was in it is now in {aside}", flush=True)
        plan(run_dir, config=config, **facts)
    return None


def free_for_another_try(run_dir: Path) -> None:
    """Have `keep_or_plan` take a run that lacked memory beside others for one that was ended from outside."""
    close(run_dir, "interrupted", "out of memory, or killed, beside other runs")


def statuses(folder: Path) -> list[str]:
    """How each run in and below a folder ended; folders that were set aside do not count."""
    ends = []
    for run_dir in run_dirs(folder) if os.path.isdir(folder) else ():
        with suppress(UserError):  # it cannot be read
            ends.append(str(read(run_dir).get("status")))
    return ends


def _refuse_different(run_dir: Path, config: dict[str, Any]) -> None:
    """Raise UserError if a folder holds a record with another configuration."""
    if not (record := read_if_there(run_dir)):
        if not config.get("search") and os.path.isdir(run_dir) and run_dirs(run_dir):
            raise UserError(f"{_NAMED_BY}: {relative(run_dir)} holds the runs of a search; choose another folder")
        return
    recorded, differences = record.get("config"), ["cannot be compared"]
    if isinstance(recorded, dict):
        theirs, ours = (dict(flatten(of)) for of in (recorded, config))
        differing = [option for option in {**theirs, **ours} if theirs.get(option) != ours.get(option)]
        differences = [
            f"{option} is {theirs.get(option)!r} there and {ours.get(option)!r} here"
            for option in differing
            if option not in ("resume", *OF_REPORTS)
            and purpose_of(option, config if option in ours else recorded) is not Purpose.SEARCH
        ]
    if differences:
        raise UserError(
            f"{_NAMED_BY}: {relative(run_dir)} holds a run of another sweep ({differences[0]}); choose another folder"
        )
