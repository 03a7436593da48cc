"""Runs of this project's training program, which prints what callbacks have to say, and whose options advice may name."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning import LightningModule, Trainer

from ..records.terminal import block, say


def own_config(module: LightningModule) -> Mapping[str, Any] | None:
    """The configuration of a run by this project's training program; None of any other."""
    return getattr(module, "batchscope_config", None)


def tell(trainer: Trainer, lines: Sequence[str]) -> None:
    """Print a callback's last lines on rank 0, unless the training program does."""
    if lines and trainer.is_global_zero and own_config(trainer.lightning_module) is None:
        say(f"\n{block(lines)}")
