"""Messages of libraries: shows warnings and output that the user asked for, and hides greetings and hints."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import ranks
from ..errors import printable
from ..files import is_inside

# Patterns of warnings that every run would print, and that do not apply to it.
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
_PACKAGE_DIR = Path(__file__).parents[1]
# Modules of Lightning that print only what a user asked for: a profile, a suggested learning rate, a verbose callback.
_REQUESTED_MODULES = ("profilers", "tuner", "callbacks")


def quiet_libraries() -> None:
    """Show Lightning's warnings and, in the first rank, output that a user asked for; format our warnings like `warn`."""
    any_warnings: Any = warnings  # type checkers refuse another `formatwarning`
    if getattr(any_warnings.formatwarning, "func", None) is not _format_warning:
        any_warnings.formatwarning = partial(_format_warning, any_warnings.formatwarning)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if ranks.current_rank().rank == 0:
        for module in _REQUESTED_MODULES:
            logging.getLogger(f"lightning.pytorch.{module}").setLevel(logging.INFO)
        shared_logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # most modules write to this logger
        shared_logger.addFilter(is_shown)
        shared_logger.setLevel(logging.INFO)
    for handler in logging.getLogger("lightning").handlers:  # the parent would print a message of its children again
        handler.setLevel(logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # torch.compile on a machine without CUDA
    for pattern in _IGNORED:
        warnings.filterwarnings("ignore", pattern)


def is_shown(message: logging.LogRecord) -> bool:
    """Whether a message of Lightning's shared logger is a warning or requested output; the end of `max_time` is neither."""
    file = Path(message.pathname)
    return message.levelno >= logging.WARNING or (file.parent.name in _REQUESTED_MODULES and file.stem != "timer")


def _format_warning(
    formatwarning: Callable[..., str], message: Any, category: type[Warning], filename: str, *where: Any
) -> str:
    """Format a warning of this package in one line without a file name, and any other warning by `formatwarning`."""
    if is_inside(Path(filename), _PACKAGE_DIR):
        return f"warning: {printable(str(message))}\n"
    return formatwarning(message, category, filename, *where)
