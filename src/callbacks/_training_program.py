"""Whether this project's training program runs: it prints the callbacks' last lines itself, and advice may name its options."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning import LightningModule, Trainer

from ..records.terminal import block, say


def program_config(module: LightningModule) -> Mapping[str, Any] | None:
    """Return the configuration of a run of this project's training program; None in any other program."""
    return getattr(module, "batchscope_config", None)


def print_last_lines(trainer: Trainer, lines: Sequence[str]) -> None:
    """Print a callback's last lines on rank 0, unless the training program prints them."""
    if lines and trainer.is_global_zero and program_config(trainer.lightning_module) is None:
        say(f"\n{block(lines)}")
