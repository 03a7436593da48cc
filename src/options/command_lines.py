"""How this program was started, and the command lines that it prints: to resume a run, to evaluate a checkpoint.

A line names the program as this one was started, and holds the words that a file alone cannot decide (trust.py).
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import trust

_PROGRAM = "batchscope"
_PART_OF_A_STEP = ("batchscope.callbacks.nonfinite.StopOnNonFinite",)  # it checks every loss and gradient

_NOT_TIMED = ("checkpoint", "progress", "prediction_images", "memory", "until_known")  # callbacks, by their names


def program(command: str = "train") -> list[str]:
    """The words that start a command, in the way in which this process was started.

    In a process that no user started, such as that of a sweep's run: `python -m batchscope.train`.
    """
    path, name = sys.argv[0], os.path.basename(sys.argv[0])
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None else ""
    if name == _PROGRAM:
        return [_shortest(path), command]
    if name.startswith(f"{_PROGRAM}-"):
        return [_shortest(os.path.join(os.path.dirname(path), f"{_PROGRAM}-{command}"))]
    if name == "__main__.py" and module.startswith(f"{_PROGRAM}."):
        return ["python", "-m", _PROGRAM, command]
    if name.endswith(".py") and not module.startswith(f"{_PROGRAM}.") and command == "train":
        return ["python", path]
    return ["python", "-m", f"{_PROGRAM}.{command}"]


def train_command(words: str) -> str:
    """A training command as this process was started, to be shown in a message."""
    return f"{shlex.join(program())} {words}"


def resume_command(config: dict[str, Any], run_dir: Path, started_as: Sequence[str] | None = None) -> str:
    """The line that resumes a run, for a shell. `started_as` is the training program, where it is not this one."""
    place = "./last" if str(run_dir) == "last" else str(run_dir)  # resume=last is the newest run
    return shlex.join([*(started_as or program()), f"resume={place}"]) + trust.words(config, run_dir)


def evaluate_command(config: dict[str, Any], checkpoint: str) -> str:
    """The line that evaluates a checkpoint, given by its path, of a run with this configuration; for a shell."""
    return shlex.join([*program("evaluate"), f"ckpt={checkpoint}"]) + trust.words(for_evaluation(config), run_dir=None)


def for_evaluation(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as an evaluation takes it: on a device of this machine, nothing watched, logged or kept."""
    trainer = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    trainer |= {"profiler": None, "default_root_dir": None}
    parts = {"callbacks": {}, "logger": {}, "search": None, "run_dir": None, "compile": False}
    return {**config, "trainer": {**config["trainer"], **trainer}, **parts}


def for_explanation(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as its explanation takes it: some training steps on one device, nothing logged or kept.

    Of the callbacks only those stay that have a part in a training step.
    """
    trainer = {"devices": 1, "num_nodes": 1, "strategy": "auto", "profiler": None, "default_root_dir": None}
    trainer |= {"min_epochs": None, "max_epochs": -1, "min_steps": None, "max_steps": -1, "max_time": None}
    trainer |= {"limit_val_batches": 0, "val_check_interval": None, "num_sanity_val_steps": 0, "fast_dev_run": False}
    trainer |= {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    callbacks = {
        name: node for name, node in (config["callbacks"] or {}).items() if node and node["_target_"] in _PART_OF_A_STEP
    }
    # Without a validation a plateau cannot be seen.
    optimizer = config["optimizer"] | (
        {"schedule": "constant"} if config["optimizer"].get("schedule") == "plateau" else {}
    )
    parts = {"callbacks": callbacks, "optimizer": optimizer, "logger": {}}
    parts |= {"search": None, "resume": None, "run_dir": None}
    return {**config, "trainer": {**config["trainer"], **trainer}, **parts}


def for_timing(config: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A run's configuration as a short timed run takes it: so many seconds, and 15 steps at least; nothing is kept.

    The callbacks stay, because they take time; those that only write files or print are left out.
    """
    trainer = {"min_epochs": 0, "max_epochs": -1, "min_steps": 15, "max_steps": -1, "max_time": {"seconds": seconds}}
    trainer |= {"limit_val_batches": 0, "val_check_interval": None, "num_sanity_val_steps": 0, "fast_dev_run": False}
    trainer |= {"profiler": None, "default_root_dir": None}
    callbacks = {name: node for name, node in (config["callbacks"] or {}).items() if name not in _NOT_TIMED}
    optimizer = config["optimizer"] | ({"schedule": "constant"} if "schedule" in config["optimizer"] else {})
    parts = {"trainer": {**config["trainer"], **trainer}, "callbacks": callbacks, "optimizer": optimizer, "logger": {}}
    return {**config, **parts, "test": False, "search": None, "resume": None}


def _shortest(path: str) -> str:
    """A program's name, where a shell finds the program by it; otherwise its path."""
    name = os.path.basename(path)
    found = shutil.which(name)
    return name if found and os.path.realpath(found) == os.path.realpath(path) else path
