"""`python train.py resume=<run folder>`: which run is resumed, and which options may change."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from .._system import relative
from ..distributed.rendezvous import of_first
from ..errors import UserError, is_text, warn
from ..files import is_set_aside, lock_folder, refuse_links
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import evaluate_command
from ..options.compose import apply_overrides
from ..options.purpose import OF_EXPERIMENTS, purpose_of
from ..options.tree import flatten
from ..options.types import Purpose
from ..records.metrics import staged
from ..records.read import FILE, read, run_dirs
from ..records.values import at

RUNS = Path("outputs/runs")  # where hydra.run.dir puts them
_LENGTH = ("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time")  # what ends a training
_PLANNED_FOR = ("trainer.max_epochs", "trainer.max_steps")  # a schedule of the learning rate ends with them
_MONITOR = re.compile(r"callbacks\.\w+\.(monitor|mode)")  # refuse_other_metric decides
_OF_TEST = ("test", "trainer.limit_test_batches")


def lock_run_dir(
    run_dir: Path, enabled: bool = True, option: str = "resume"
) -> contextlib.AbstractContextManager[None]:
    """Lock a run's folder, so that no second process trains in it; UserError if one does, or it cannot be written.

    The folder is created if it is missing. `enabled` is False on all ranks but the first.
    """
    busy = f"{relative(run_dir)} is being trained right now"
    return lock_folder(run_dir, option, busy) if enabled else contextlib.nullcontext()


def find(overrides: list[str]) -> tuple[Path, list[str]]:
    """The run folder that `resume=` on a command line names, and the other options on it; UserError as `run_folder`."""
    named = [text.removeprefix("resume=").strip("'\"") for text in overrides if text.startswith("resume=")]
    if len(named) != 1 or not named[0]:
        raise UserError("resume: takes the folder of one run, or 'last'")
    if named[0] == "last":  # a new run may begin before another rank looks
        named = [of_first("last", lambda: str(newest("resume")))]
    return run_folder(named[0], "resume"), [text for text in overrides if not text.startswith("resume=")]


def run_folder(name: str, option: str) -> Path:
    """The folder of the run that is named by its path, by its record, or as `last`; UserError if there is none."""
    if name == "last":
        return newest(option)
    path = Path(name)
    run_dir = path.parent if path.name == FILE else path
    if os.path.isfile(run_dir / FILE):  # also false for a name that no file can have
        return run_dir
    if not os.path.exists(path):
        raise UserError(f"{option}: got '{name}', which does not exist; it takes a run's folder, or 'last'")
    hint = "; a sweep is resumed by its own command and hydra.sweep.dir=…" if option == "resume" else ""
    if around := [folder for folder in path.parents[:2] if os.path.isfile(folder / FILE)]:  # of a checkpoint
        hint = f"; the run is {around[0]}"
    raise UserError(f"{option}: got '{name}', which is not the folder of a run (no {FILE} in it){hint}")


def newest(option: str) -> Path:
    """The folder of the run that was started last; UserError without one. A record that cannot be read is passed with a warning."""
    runs: list[tuple[str, Path]] = []
    places = {path.parent for path in RUNS.glob(f"*/{FILE}")}  # also through links, which a walk does not follow
    places = {place for place in places if not place.name.startswith(".") and not is_set_aside(place.name)}
    for place in sorted(places.union(run_dirs(RUNS) if RUNS.is_dir() else ())):
        try:
            runs.append((str(read(place).get("started", "")), place))
        except UserError as error:
            warn(f"{option}: got 'last', and a run is passed: {error}")
    if not runs:
        raise UserError(f"{option}: got 'last', and there is no run in {RUNS}")
    return max(runs)[1]


def configuration(
    record: dict[str, Any], run_dir: Path, overrides: list[str], known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The checked configuration to resume with: the recorded one, with changed options.

    The record may come from anybody: UserError if it asks for what only a command line may, unless it is `known`, the
    configuration that a command line alone gives; and if an option would change the result.
    """
    file = relative(run_dir / FILE)
    before = check_config(recorded_config(record, run_dir))
    config = check_config(apply_overrides(before, overrides))
    refuse_links(run_dir)
    if known is None or not is_same(known, before):
        trust.confirm({**config, "init": None} if recorded_checkpoint(record) else config, overrides, file)
    old, new = dict(flatten(before)), dict(flatten(config))
    # A LightningModule has a schedule of its own.
    planned = () if at(record, "model.lightning_module") is True else _PLANNED_FOR
    for key in dict.fromkeys([*old, *new]):
        purposes = {purpose_of(key, one) for one, options in ((before, old), (config, new)) if key in options}
        is_fixed = Purpose.RESULT in purposes or key in (*planned, *OF_EXPERIMENTS)  # callbacks hold a target
        if old.get(key) != new.get(key) and is_fixed and not _MONITOR.fullmatch(key):
            _refuse(key, old.get(key), new.get(key), config)
    return {**config, "resume": str(run_dir)}


def refuse_other_metric(provenance: dict[str, Any], config: dict[str, Any], measured: set[str]) -> None:
    """UserError if a callback is to follow another metric, or in another direction, once its metric was measured."""
    known = {staged(name) for name in measured}
    for name in config["callbacks"] or {}:
        followed = at(provenance, f"config.callbacks.{name}.monitor")
        for key in (f"callbacks.{name}.monitor", f"callbacks.{name}.mode"):
            old, new = at(provenance, f"config.{key}"), at(config, key)
            if old != new and (not is_text(followed) or staged(followed) in known):
                _refuse(key, old, new, config)


def is_same(known: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a configuration is a recorded one, but for the option that resumes it."""
    without = ({key: value for key, value in one.items() if key != "resume"} for one in (known, config))
    one, other = (json.loads(json.dumps(each, default=str)) for each in without)  # as from a file
    return one == other


def recorded_config(record: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The configuration of a record, in plain containers.

    UserError if it is none, or `choices`, `overrides` or `resumed` are not what a run writes.
    """
    file = relative(run_dir / FILE)
    for key, kind in (("choices", dict), ("overrides", list), ("resumed", list)):
        found = record.get(key, kind())
        texts = [*found, *found.values()] if isinstance(found, dict) else [] if key == "resumed" else found
        is_fit = trust.is_value if key == "overrides" else is_text
        if not isinstance(found, kind) or not all(text is None or is_fit(text) for text in texts):
            raise UserError(f"{file}: cannot be read: its {key} are not those of a run")
    return trust.plain(record.get("config"), file)


def recorded_checkpoint(record: dict[str, Any]) -> str:
    """The checkpoint that a run has written last, as its record says; empty where it has none."""
    kept = record.get("checkpoints")
    return str(kept.get("last") or kept.get("best") or "") if isinstance(kept, dict) else ""


def continues_training(config: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether a configuration asks for another length of training than a finished run has had."""
    before = record["config"]["trainer"]
    return any(config["trainer"].get(key) != before.get(key) for key in _LENGTH)


def nothing_to_resume(run_dir: Path, record: dict[str, Any], config: dict[str, Any]) -> str:
    """What to say to a user who resumes a finished run as it was, or with a configuration that tests it otherwise."""
    is_limited = record["config"]["trainer"].get("max_time") is not None
    longer = "; a longer trainer.max_time, or trainer.max_time=null, may continue it" if is_limited else ""
    kept = at(record, "checkpoints.best") or at(record, "checkpoints.last")
    differing = {key: at(config, key) for key in _OF_TEST if at(config, key) != at(record["config"], key)}
    if is_text(kept) and differing and config["test"]:
        typed = [trust.as_words(key, value) for key, value in differing.items() if key != "test"]
        longer += f"; to test it, write {' '.join([evaluate_command(config, str(run_dir / kept)), *typed])}"
    return f"{run_dir} has finished; there is nothing to resume{longer}"


def _refuse(key: str, old: Any, new: Any, config: dict[str, Any]) -> None:
    why = "would change the result"
    if key in _PLANNED_FOR:
        schedule = config.get("optimizer", {}).get("schedule", "constant")
        if schedule in ("constant", "step"):
            return
        why = f"would change the learning rate: optimizer.schedule={schedule} ends with the run"
    raise UserError(f"resume: {key} is {old} in the run, and {new} {why}; start another run for it")
