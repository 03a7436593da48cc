"""TensorBoard: the logger of a run, in which the first cards are those that people look for."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from ..records.metrics import card


class TensorBoard(TensorBoardLogger):
    """Lightning's TensorBoardLogger, with samples/s, MFU, losses and accuracies in front of all else."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics({card(key): value for key, value in metrics.items()}, step)
