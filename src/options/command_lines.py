"""The command lines that the program prints, and the configurations that commands derive from that of a run.

A printed command line has the words that a file alone cannot decide (trust.py).
"""

from pathlib import Path
from typing import Any

from .._system import command_line
from ..errors import UserError
from . import trust
from .groups import COLLECTIONS, SECTIONS
from .overrides import parse
from .purpose import NO_END, only_observes
from .signatures import inherits
from .tree import TARGET, flatten

_TIMED_OBSERVERS = ("batchscope.callbacks.nonfinite.StopOnNonFinite",)  # only observes, but takes time in a step

_ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
# Options of a Trainer that takes training steps until a callback ends it, and does nothing else.
_UNTIL_STOPPED: dict[str, Any] = {"min_epochs": 0, "max_epochs": -1, "max_steps": NO_END, "fast_dev_run": False}
_UNTIL_STOPPED |= {"limit_val_batches": 0, "num_sanity_val_steps": 0}
_UNTIL_STOPPED |= dict.fromkeys(("min_steps", "max_time", "val_check_interval", "profiler"))
_NOT_EVALUATED = ("optimizer", "callbacks", "logger", "search", "target", "target_metric")
_NOT_EVALUATED += ("test", "timing", "enough", "margin", "optimized_metric", "tags", "resume")
# Callbacks that a timed or explained run leaves out: they write files, print, search, average or end a run.
_DROPPED_CALLBACKS = (
    "lightning.pytorch.callbacks.early_stopping.EarlyStopping",
    "lightning.pytorch.callbacks.checkpoint.Checkpoint",
    "lightning.pytorch.callbacks.timer.Timer",
    "lightning.pytorch.callbacks.progress.progress_bar.ProgressBar",
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder",
    "lightning.pytorch.callbacks.stochastic_weight_avg.StochasticWeightAveraging",
    "batchscope.callbacks.target.StopAtTarget",
    "batchscope.callbacks.until_known.StopWhenKnown",
)
# Ends a timed run. So high a precision is not reached: `seconds`, which is added, decides.
_STOP_WHEN_KNOWN = {"_target_": "batchscope.callbacks.until_known.StopWhenKnown", "precision": 0.001}


def resume_command(config: dict[str, Any], run_dir: Path) -> str:
    """Return the shell command that resumes a run."""
    path = "./last" if str(run_dir) == "last" else str(run_dir)  # resume=last is the newest run
    if any(run_dir.glob("checkpoints/*.ckpt")):
        config = {**config, "init": None}  # the checkpoint has the weights
    return command_line(["batchscope", "train", f"resume={path}"]) + trust.confirming_words(config)


def evaluate_command(config: dict[str, Any], checkpoint: str) -> str:
    """Return the shell command that evaluates the checkpoint at this path, of a run with this configuration."""
    return command_line(["batchscope", "evaluate", f"ckpt={checkpoint}"]) + trust.confirming_words(
        for_evaluation(config)
    )


def for_evaluation(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run's evaluation: one device of this machine, no callbacks, no logs, no files."""
    trainer = {"accelerator": "auto", **_ONE_DEVICE, "profiler": None}
    sections = {"callbacks": {}, "logger": {}, "search": None, "compile": False, "init": None}
    return {**config, "trainer": {**config["trainer"], **trainer}, **sections}


def refuse_not_evaluated(overrides: list[str], recorded: dict[str, Any]) -> None:
    """Raise UserError for an override that an evaluation does not read.

    An override may repeat a value of the recorded configuration, which confirms it (trust.py).
    """
    saved = dict(flatten(recorded))
    for override in parse(overrides):
        key, value = override.key_or_group, None if override.is_delete() else override.value()
        section, values = key.partition(".")[0], {key: value}
        if isinstance(value, dict):
            values = dict(flatten(value, f"{key}."))
        if section in _NOT_EVALUATED and any(name not in saved or saved[name] != values[name] for name in values):
            reason = f", which reads no {section}" if section in (*SECTIONS, *COLLECTIONS) else ""
            raise UserError(f"{key}: has no effect on an evaluation{reason}")


def refuse_hydra_options(overrides: list[str]) -> None:
    """Raise UserError for an override of Hydra's own section, which the commands that measure do not read."""
    for override in parse(overrides):
        if override.is_hydra_override():
            sets_variables = override.key_or_group.startswith("hydra.job.env_set")
            instead = "; set variables in the environment" if sets_variables else " alone"
            raise UserError(f"{override.key_or_group}: is for batchscope train{instead}")


def for_explanation(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run's explanation: some training steps on one device, no logs, no files.

    Callbacks that only observe are left out, too, except `_TIMED_OBSERVERS`. Others stay: freezing layers changes a step.
    """
    disabled = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = {**_ONE_DEVICE, **_UNTIL_STOPPED, **disabled}
    if isinstance(devices := config["trainer"].get("devices"), list) and len(devices) == 1:
        trainer["devices"] = devices  # a GPU by its number
    callbacks = {
        name: node
        for name, node in _step_callbacks(config).items()
        if node[TARGET] in _TIMED_OBSERVERS or not only_observes(node[TARGET])
    }
    sections = {"callbacks": callbacks, "logger": {}, "search": None, "resume": None, "init": None}
    return {**config, "trainer": {**config["trainer"], **trainer}, **sections}


def for_timing(config: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the configuration of a short timed run, which ends after this many seconds of measured steps.

    Callbacks stay, because they take time, except those that write files, print, find a rate, wait for the last epochs
    or end a run. The timed run keeps nothing.
    """
    callbacks = {**_step_callbacks(config), "until_known": {**_STOP_WHEN_KNOWN, "seconds": seconds}}
    sections = {"trainer": {**config["trainer"], **_UNTIL_STOPPED}, "callbacks": callbacks}
    if "schedule" in config.get("optimizer", {}):  # a LightningModule has none
        sections["optimizer"] = {**config["optimizer"], "schedule": "constant"}
    options = {name: None for name in ("target", "target_metric") if name in config}
    options |= {"logger": {}, "test": False, "search": None, "resume": None, "timing": "auto"}
    return {**config, **sections, **options, "init": None}


def _step_callbacks(config: dict[str, Any]) -> dict[str, Any]:
    """Return the callback nodes of a configuration without those of `_DROPPED_CALLBACKS`."""
    nodes = {name: node for name, node in (config["callbacks"] or {}).items() if node}
    return {k: node for k, node in nodes.items() if not any(inherits(node[TARGET], c) for c in _DROPPED_CALLBACKS)}
