"""A sweep's folder: to which sweep it belongs, and which of its runs are kept when the sweep is started again."""

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from .._system import relative
from ..checkpointing.resume import lock_run_dir
from ..errors import UserError
from ..files import LOCK, as_write_error, lock_folder, refuse_links, set_aside
from ..options.purpose import REPORT_OPTIONS, purpose_of
from ..options.tree import flatten
from ..options.types import Purpose
from ..records.read import FILE, has_checkpoint, read, read_or_empty, run_dirs
from ..records.run_record import record_end, update_record, write_planned

# A run with one of these statuses is not run again: "does not fit into memory" is a result, too.
KEPT_STATUSES = ("finished", "out_of_memory")
_ENDED_STATUSES = (*KEPT_STATUSES, "failed", "not_finite")  # neither is a run that failed by itself
# The run was ended from outside; it is resumed if it has a checkpoint.
UNFINISHED_STATUSES = ("running", "interrupted", "killed")
# What a sweep, Hydra and its plugins write directly into the sweep's folder, as glob patterns.
_WRITTEN_NAMES = ("[0-9]*", "report", LOCK, ".submitit", "multirun.yaml", "optimization_results.yaml")
_OPTION = "hydra.sweep.dir"


def lock_sweep_dir(sweep_dir: Path) -> AbstractContextManager[None]:
    """Lock a sweep's folder; UserError if another process holds the lock, or a link in the folder leads out of it."""
    refuse_links(sweep_dir, "the sweep's folder", written=_WRITTEN_NAMES)
    return lock_folder(sweep_dir, _OPTION, f"a sweep is being run in {sweep_dir} right now")


def refuse_other_sweep(sweep_dir: Path, configs: list[dict[str, Any]]) -> None:
    """Raise UserError if the folder holds the runs of a sweep other than the one with these configurations."""
    if os.path.exists(sweep_dir / FILE):
        raise UserError(f"{_OPTION}: {sweep_dir} holds a single run; choose another folder")
    for number, config in enumerate(configs):
        _refuse_other_run(sweep_dir / str(number), config)


def keep_or_plan(run_dir: Path, config: dict[str, Any], **record_fields: Any) -> dict[str, Any] | None:
    """Return the record of a run that is not run again; otherwise prepare the folder for the run, and return None.

    A run that was ended from outside and has a checkpoint will be resumed. The files of any other run that has not
    ended by itself are set aside. UserError if the folder holds a run with another configuration, or another process
    trains in the folder.
    """
    _refuse_other_run(run_dir, config)
    with lock_run_dir(run_dir, option=_OPTION):  # a run that a launcher started may outlive its sweep
        record, may_resume = read_or_empty(run_dir), has_checkpoint(run_dir)
        status = record.get("status")
        if status in _ENDED_STATUSES:
            # Options that reports read from the records may have new values.
            report_options = {key: config[key] for key in REPORT_OPTIONS if key in config}
            if not report_options.items() <= record["config"].items():
                update_record(run_dir, config={**record["config"], **report_options})
            return read(run_dir)
        if status in UNFINISHED_STATUSES and may_resume:
            if status == "running":
                record_end(run_dir, "killed", "ended without a word")
            return None
        if status != "planned" and (record or may_resume):
            with as_write_error(_OPTION, run_dir):
                aside = relative(set_aside(run_dir))
            print(f"{relative(run_dir)} begins anew; what was in it is now in {aside}", flush=True)
        write_planned(run_dir, config=config, **record_fields)
    return None


def mark_for_retry(run_dir: Path) -> None:
    """Record a run that lacked memory beside others as interrupted, so that `keep_or_plan` has it run again."""
    record_end(run_dir, "interrupted", "out of memory, or killed, beside other runs")


def statuses(folder: Path) -> list[str]:
    """Return the status of each run in and below a folder, without runs that were set aside or cannot be read."""
    run_statuses = []
    for run_dir in run_dirs(folder) if os.path.isdir(folder) else ():
        with suppress(UserError):
            run_statuses.append(str(read(run_dir).get("status")))
    return run_statuses


def _refuse_other_run(run_dir: Path, config: dict[str, Any]) -> None:
    """Raise UserError if a folder holds a record with another configuration."""
    if not (record := read_or_empty(run_dir)):
        if not config.get("search") and os.path.isdir(run_dir) and run_dirs(run_dir):
            raise UserError(f"{_OPTION}: {relative(run_dir)} holds the runs of a search; choose another folder")
        return
    recorded, differences = record.get("config"), ["cannot be compared"]
    if isinstance(recorded, dict):
        old, new = dict(flatten(recorded)), dict(flatten(config))
        changed = [option for option in {**old, **new} if old.get(option) != new.get(option)]
        differences = [
            f"{option} is {old.get(option)!r} there and {new.get(option)!r} here"
            for option in changed
            if option not in ("resume", *REPORT_OPTIONS)
            and purpose_of(option, config if option in new else recorded) is not Purpose.SEARCH
        ]
    if differences:
        raise UserError(
            f"{_OPTION}: {relative(run_dir)} holds a run of another sweep ({differences[0]}); choose another folder"
        )
