"""The command lines that the program prints, with the words that a file alone cannot decide (trust.py), and the
configurations of programs that take a run's own and change it.
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

_PART_OF_A_STEP = ("batchscope.callbacks.nonfinite.StopOnNonFinite",)  # observes, and checks every loss and gradient

_ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
# Of a trainer that takes training steps until a callback ends it, and keeps nothing.
_SOME_STEPS: dict[str, Any] = {"min_epochs": 0, "max_epochs": -1, "max_steps": NO_END, "fast_dev_run": False}
_SOME_STEPS |= {"limit_val_batches": 0, "num_sanity_val_steps": 0}
_SOME_STEPS |= dict.fromkeys(("min_steps", "max_time", "val_check_interval", "profiler"))
# Sections and options that an evaluation does not read.
_NOT_EVALUATED = ("optimizer", "callbacks", "logger", "search", "target", "target_metric")
_NOT_EVALUATED += ("test", "timing", "enough", "margin", "optimized_metric", "tags", "resume")
# Callbacks that some steps without a result have no use for: they write files, print, search, average or end a run.
_NOT_TIMED = (
    "lightning.pytorch.callbacks.early_stopping.EarlyStopping",
    "lightning.pytorch.callbacks.checkpoint.Checkpoint",
    "lightning.pytorch.callbacks.timer.Timer",
    "lightning.pytorch.callbacks.progress.progress_bar.ProgressBar",
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder",
    "lightning.pytorch.callbacks.stochastic_weight_avg.StochasticWeightAveraging",
    "batchscope.callbacks.target.StopAtTarget",
    "batchscope.callbacks.until_known.StopWhenKnown",
)
# It ends by its seconds.
_UNTIL = {"_target_": "batchscope.callbacks.until_known.StopWhenKnown", "precision": 0.001}


def resume_command(config: dict[str, Any], run_dir: Path) -> str:
    """The line that resumes a run, for a shell."""
    place = "./last" if str(run_dir) == "last" else str(run_dir)  # resume=last is the newest run
    if any(run_dir.glob("checkpoints/*.ckpt")):
        config = {**config, "init": None}  # the checkpoint has the weights
    return command_line(["batchscope", "train", f"resume={place}"]) + trust.words(config)


def evaluate_command(config: dict[str, Any], checkpoint: str) -> str:
    """The line that evaluates a checkpoint, given by its path, of a run with this configuration; for a shell."""
    return command_line(["batchscope", "evaluate", f"ckpt={checkpoint}"]) + trust.words(for_evaluation(config))


def for_evaluation(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as an evaluation takes it: on a device of this machine, nothing watched, logged or kept."""
    trainer = {"accelerator": "auto", **_ONE_DEVICE, "profiler": None}
    parts = {"callbacks": {}, "logger": {}, "search": None, "compile": False, "init": None}
    return {**config, "trainer": {**config["trainer"], **trainer}, **parts}


def refuse_not_evaluated(overrides: list[str], recorded: dict[str, Any]) -> None:
    """Raise UserError for a word of a command line that an evaluation does not read.

    A word may repeat what the configuration of a file has: it confirms that (trust.py).
    """
    held = dict(flatten(recorded))
    for one in parse(overrides):
        key, value = one.key_or_group, None if one.is_delete() else one.value()
        typed, section = {key: value}, key.partition(".")[0]
        if isinstance(value, dict):
            typed = dict(flatten(value, f"{key}."))
        if section in _NOT_EVALUATED and any(name not in held or held[name] != typed[name] for name in typed):
            reason = f", which reads no {section}" if section in (*SECTIONS, *COLLECTIONS) else ""
            raise UserError(f"{key}: has no effect on an evaluation{reason}")


def refuse_of_hydra(overrides: list[str]) -> None:
    """Raise UserError for a word of Hydra's own section, which the commands that measure do not read."""
    for one in parse(overrides):
        if one.is_hydra_override():
            sets_variables = one.key_or_group.startswith("hydra.job.env_set")
            instead = "; set variables in the environment" if sets_variables else " alone"
            raise UserError(f"{one.key_or_group}: is for batchscope train{instead}")


def for_explanation(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as its explanation takes it: some training steps on one device, nothing logged or kept.

    Of the callbacks of a timed run those stay that do more than observe: one that freezes layers makes it another step.
    """
    enabled = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = {**_ONE_DEVICE, **_SOME_STEPS, **enabled}
    if isinstance(named := config["trainer"].get("devices"), list) and len(named) == 1:
        trainer["devices"] = named  # a GPU by its number
    callbacks = {
        name: node
        for name, node in _in_steps(config).items()
        if node[TARGET] in _PART_OF_A_STEP or not only_observes(node[TARGET])
    }
    parts = {"callbacks": callbacks, "logger": {}, "search": None, "resume": None, "init": None}
    return {**config, "trainer": {**config["trainer"], **trainer}, **parts}


def for_timing(config: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A run's configuration as a short timed run takes it, which ends after so many seconds of measured steps.

    The callbacks stay, because they take time; those that write files, print, find a rate, wait for the last epochs or end
    a run are left out. Nothing is kept.
    """
    callbacks = {**_in_steps(config), "until_known": {**_UNTIL, "seconds": seconds}}
    parts = {"trainer": {**config["trainer"], **_SOME_STEPS}, "callbacks": callbacks}
    if "schedule" in config.get("optimizer", {}):  # a LightningModule has none
        parts["optimizer"] = {**config["optimizer"], "schedule": "constant"}
    once = {name: None for name in ("target", "target_metric") if name in config}
    once |= {"logger": {}, "test": False, "search": None, "resume": None, "timing": "auto"}
    return {**config, **parts, **once, "init": None}


def _in_steps(config: dict[str, Any]) -> dict[str, Any]:
    """The callbacks of a configuration, but for those of `_NOT_TIMED`."""
    kept = {name: node for name, node in (config["callbacks"] or {}).items() if node}
    return {name: o for name, o in kept.items() if not any(inherits(o[TARGET], kind) for kind in _NOT_TIMED)}
