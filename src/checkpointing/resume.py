"""`python train.py resume=<run folder>`: find the run to resume, and check which options may change."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from .._system import relative
from ..distributed.rendezvous import decide_in_first_rank
from ..errors import UserError, is_text, warn
from ..files import is_set_aside, lock_folder, refuse_links
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import evaluate_command
from ..options.compose import apply_overrides
from ..options.purpose import EXPERIMENT_OPTIONS, default_of, purpose_of
from ..options.tree import flatten
from ..options.types import Purpose
from ..records.metrics import staged
from ..records.read import FILE, read, run_dirs
from ..records.values import at

RUNS = Path("outputs/runs")  # the default parent folder of hydra.run.dir
_LENGTH_KEYS = ("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time")  # trainer options that end a training
_SCHEDULE_ENDS = ("trainer.max_epochs", "trainer.max_steps")  # a schedule of the learning rate ends with them
_MONITOR_KEY = re.compile(r"callbacks\.\w+\.(monitor|mode)")  # `refuse_other_metric` decides whether it may change
_TEST_KEYS = ("test", "trainer.limit_test_batches")


def lock_run_dir(
    run_dir: Path, enabled: bool = True, option: str = "resume"
) -> contextlib.AbstractContextManager[None]:
    """Lock a run's folder against a second process; UserError if another one trains in it, or it cannot be written.

    The folder is created if it is missing. `enabled` is False on all ranks but the first.
    """
    refusal = f"{relative(run_dir)} is being trained right now"
    return lock_folder(run_dir, option, refusal) if enabled else contextlib.nullcontext()


def split_resume_override(overrides: list[str]) -> tuple[Path, list[str]]:
    """Return the run folder that `resume=` names, and the other overrides; UserError as in `run_folder`."""
    folders = [text.removeprefix("resume=").strip("'\"") for text in overrides if text.startswith("resume=")]
    if len(folders) != 1 or not (folder := folders[0]):
        raise UserError("resume: takes the folder of one run, or 'last'")
    if folder == "last":  # rank 0 decides: a new run may begin before another rank looks
        folder = decide_in_first_rank("last", lambda: str(newest_run_folder("resume")))
    return run_folder(folder, "resume"), [text for text in overrides if not text.startswith("resume=")]


def run_folder(name: str, option: str) -> Path:
    """Return the folder of a run that is named by its path, by its record, or as `last`; UserError without such a run."""
    if name == "last":
        return newest_run_folder(option)
    path = Path(name)
    run_dir = path.parent if path.name == FILE else path
    if os.path.isfile(run_dir / FILE):  # False, too, for a name that is no valid path
        return run_dir
    if not os.path.exists(path):
        raise UserError(f"{option}: got '{name}', which does not exist; it takes a run's folder, or 'last'")
    hint = "; a sweep is resumed by its own command and hydra.sweep.dir=…" if option == "resume" else ""
    if parents := [folder for folder in path.parents[:2] if os.path.isfile(folder / FILE)]:  # the path of a checkpoint
        hint = f"; the run is {parents[0]}"
    raise UserError(f"{option}: got '{name}', which is not the folder of a run (no {FILE} in it){hint}")


def newest_run_folder(option: str) -> Path:
    """Return the folder of the run that was started last; UserError without one. Warn of records that cannot be read."""
    started_runs: list[tuple[str, Path]] = []
    folders = {path.parent for path in RUNS.glob(f"*/{FILE}")}  # also behind links, which `run_dirs` does not follow
    folders = {folder for folder in folders if not folder.name.startswith(".") and not is_set_aside(folder.name)}
    for folder in sorted(folders.union(run_dirs(RUNS) if RUNS.is_dir() else ())):
        try:
            started_runs.append((str(read(folder).get("started", "")), folder))
        except UserError as error:
            warn(f"{option}: got 'last', and a run is skipped: {error}")
    if not started_runs:
        raise UserError(f"{option}: got 'last', and there is no run in {RUNS}")
    return max(started_runs)[1]


def config_to_resume(
    record: dict[str, Any], run_dir: Path, overrides: list[str], typed_config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the checked configuration to resume with: the recorded configuration with the overrides.

    The record may come from anybody. UserError if the record asks for what only a command line may ask for, unless its
    configuration is `typed_config`, which a command line alone gives; and if an override would change the result.
    """
    file = relative(run_dir / FILE)
    old_config = check_config(recorded_config(record, run_dir))
    config = check_config(apply_overrides(old_config, overrides))
    refuse_links(run_dir)
    if typed_config is None or not is_same_config(typed_config, old_config):
        trust.refuse_unconfirmed({**config, "init": None} if recorded_checkpoint(record) else config, overrides, file)
    old, new = dict(flatten(old_config)), dict(flatten(config))
    # A LightningModule has a schedule of its own.
    schedule_ends = () if at(record, "model.lightning_module") is True else _SCHEDULE_ENDS
    for key in dict.fromkeys([*old, *new]):
        purposes = {purpose_of(key, node) for node, options in ((old_config, old), (config, new)) if key in options}
        is_fixed = Purpose.RESULT in purposes or key in (*schedule_ends, *EXPERIMENT_OPTIONS)  # callbacks hold a target
        before = old[key] if key in old else default_of(key, old_config)
        after = new[key] if key in new else default_of(key, config)
        if before != after and is_fixed and not _MONITOR_KEY.fullmatch(key):
            _refuse(key, before, after, config)
    return {**config, "resume": str(run_dir)}


def refuse_other_metric(provenance: dict[str, Any], config: dict[str, Any], measured: set[str]) -> None:
    """Raise UserError if a monitor or mode of a callback differs from before, once its metric was measured."""
    measured_names = {staged(name) for name in measured}
    for name in config["callbacks"] or {}:
        monitor = at(provenance, f"config.callbacks.{name}.monitor")
        for key in (f"callbacks.{name}.monitor", f"callbacks.{name}.mode"):
            old, new = at(provenance, f"config.{key}"), at(config, key)
            if old != new and (not is_text(monitor) or staged(monitor) in measured_names):
                _refuse(key, old, new, config)


def is_same_config(config: dict[str, Any], other_config: dict[str, Any]) -> bool:
    """Whether two configurations are equal, apart from `resume`, once both are plain JSON as in a record."""
    nodes = ({key: value for key, value in node.items() if key != "resume"} for node in (config, other_config))
    plain, other_plain = (json.loads(json.dumps(node, default=str)) for node in nodes)
    return plain == other_plain


def recorded_config(record: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the configuration of a record, in plain containers.

    UserError if the record has none, or its `choices`, `overrides` or `resumed` are not what a run writes.
    """
    file = relative(run_dir / FILE)
    for key, kind in (("choices", dict), ("overrides", list), ("resumed", list)):
        value = record.get(key, kind())
        texts = [*value, *value.values()] if isinstance(value, dict) else [] if key == "resumed" else value
        is_valid = trust.is_value if key == "overrides" else is_text
        if not isinstance(value, kind) or not all(text is None or is_valid(text) for text in texts):
            raise UserError(f"{file}: cannot be read: its {key} are not those of a run")
    return trust.copy_plain(record.get("config"), file)


def recorded_checkpoint(record: dict[str, Any]) -> str:
    """Return the path of the checkpoint that a run has written last, as its record has it; empty without a checkpoint."""
    paths = record.get("checkpoints")
    return str(paths.get("last") or paths.get("best") or "") if isinstance(paths, dict) else ""


def continues_training(config: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether a configuration asks for another length of training than that of a finished run."""
    old_trainer = record["config"]["trainer"]
    return any(config["trainer"].get(key) != old_trainer.get(key) for key in _LENGTH_KEYS)


def nothing_to_resume(run_dir: Path, record: dict[str, Any], config: dict[str, Any]) -> str:
    """Return the message for a resume of a finished run that would train nothing, with the command of another test."""
    is_limited = record["config"]["trainer"].get("max_time") is not None
    hint = "; a longer trainer.max_time, or trainer.max_time=null, may continue it" if is_limited else ""
    checkpoint = at(record, "checkpoints.best") or at(record, "checkpoints.last")
    changed = {key: at(config, key) for key in _TEST_KEYS if at(config, key) != at(record["config"], key)}
    if is_text(checkpoint) and changed and config["test"]:
        words = [trust.as_words(key, value) for key, value in changed.items() if key != "test"]
        hint += f"; to test it, write {' '.join([evaluate_command(config, str(run_dir / checkpoint)), *words])}"
    return f"{run_dir} has finished; there is nothing to resume{hint}"


def _refuse(key: str, old: Any, new: Any, config: dict[str, Any]) -> None:
    reason = "would change the result"
    if key in _SCHEDULE_ENDS:
        schedule = config.get("optimizer", {}).get("schedule", "constant")
        if schedule in ("constant", "step"):
            return
        reason = f"would change the learning rate: optimizer.schedule={schedule} ends with the run"
    raise UserError(f"resume: {key} is {old} in the run, and {new} {reason}; start another run for it")
