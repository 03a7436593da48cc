"""Messages of libraries: warnings and what was asked for are shown; greetings and hints are not."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import ranks
from ..errors import printable
from ..files import is_inside

# Warnings that every run would print, and that its settings have answered already.
_IGNORED = (
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*Experiment logs directory .* exists and is not empty.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
    ".*using the WeightAveraging callback with a model that overrides.*",
    ".*using the WeightAveraging callback, but loading a checkpoint outside.*",
)
_HERE = Path(__file__).parents[1]
# The parts of Lightning that print only what a user asked for: a profile, a learning rate found, a verbose callback.
_ASKED_FOR = ("profilers", "tuner", "callbacks")


def quiet_libraries() -> None:
    """Show Lightning's warnings and, in the first rank, what a user asked for; a warning of ours as `warn` has it."""
    python: Any = warnings
    if getattr(python.formatwarning, "func", None) is not _format_warning:
        python.formatwarning = partial(_format_warning, python.formatwarning)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if ranks.current().rank == 0:
        for part in _ASKED_FOR:
            logging.getLogger(f"lightning.pytorch.{part}").setLevel(logging.INFO)
        shared = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # most parts write to this logger
        shared.addFilter(is_shown)
        shared.setLevel(logging.INFO)
    for handler in logging.getLogger("lightning").handlers:  # it would print a second time what its children print
        handler.setLevel(logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # torch.compile on a machine without CUDA
    for pattern in _IGNORED:
        warnings.filterwarnings("ignore", pattern)


def is_shown(message: logging.LogRecord) -> bool:
    """Whether a message of Lightning's shared logger is a warning or was asked for; the end of `max_time` is not."""
    file = Path(message.pathname)
    return message.levelno >= logging.WARNING or (file.parent.name in _ASKED_FOR and file.stem != "timer")


def _format_warning(
    others: Callable[..., str], message: Any, category: type[Warning], filename: str, *where: Any
) -> str:
    """A warning of this package, which its callbacks give in any project, in one line without a file; others stay."""
    if is_inside(Path(filename), _HERE):
        return f"warning: {printable(str(message))}\n"
    return others(message, category, filename, *where)
