"""How this program was started, and the command lines that it prints: to resume a run, to evaluate a checkpoint.

Whoever copies such a line gets what it says: it names the program as this one was started, and holds the words that a
file alone cannot decide (trust.py).
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import trust

_TRAIN, _EVALUATE = "batchscope-train", "batchscope-evaluate"  # as they are installed


def program() -> list[str]:
    """The words that started this program: a script, a module, or its installed name.

    In a process that no user started as such, as that of a sweep's run, those of the training program.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None else ""
    if module.startswith("batchscope.") and module != "batchscope.sweep.job":
        return ["python", "-m", module]
    if not module.startswith("batchscope.") and sys.argv[0].endswith(".py"):
        return ["python", sys.argv[0]]
    if os.path.basename(sys.argv[0]).startswith("batchscope-"):
        return [_shortest(sys.argv[0])]
    return ["python", "-m", "batchscope.train"]


def resume_command(config: dict[str, Any], run_dir: Path, started_as: Sequence[str] | None = None) -> str:
    """The line that resumes a run, for a shell.

    Args:
        config: of the run, as its command line gives it.
        run_dir: the run's.
        started_as: the training program, where it is not this one.
    """
    place = "./last" if str(run_dir) == "last" else str(run_dir)  # resume=last is the newest run
    return shlex.join([*(started_as or program()), f"resume={place}"]) + trust.words(config, run_dir)


def evaluate_command(config: dict[str, Any], checkpoint: str) -> str:
    """The line that evaluates a checkpoint of a run, for a shell.

    Args:
        config: of the run, as its command line gives it.
        checkpoint: its path.
    """
    first = program()[0]
    installed = os.path.basename(first) == _TRAIN
    words = [os.path.join(os.path.dirname(first), _EVALUATE)] if installed else ["python", "-m", "batchscope.evaluate"]
    return shlex.join([*words, f"ckpt={checkpoint}"]) + trust.words(for_evaluation(config), run_dir=None)


def for_evaluation(config: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation takes of a run's configuration.

    The device is this machine's choice, whatever the training ran on; nothing is watched, logged or kept.
    """
    trainer = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    trainer |= {"profiler": None, "default_root_dir": None}
    parts = {"callbacks": {}, "logger": {}, "search": None, "run_dir": None}
    return {**config, "trainer": {**config["trainer"], **trainer}, **parts}


def _shortest(path: str) -> str:
    """A program's name, where a shell finds the program by it; otherwise its path."""
    name = os.path.basename(path)
    found = shutil.which(name)
    return name if found and os.path.realpath(found) == os.path.realpath(path) else path
