"""TensorBoard: the logger of a run, with the most important cards first."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from ..records.metrics import card


class TensorBoard(TensorBoardLogger):
    """Lightning's TensorBoardLogger, with samples/s, MFU, losses and accuracies before all other cards.

    Attributes:
        waited_s: the seconds that the run has waited so far; "Relative" in TensorBoard leaves them out.
    """

    waited_s = 0.0

    @property
    @override
    def experiment(self) -> Any:
        writer = super().experiment
        if self.waited_s and (file := writer.file_writer) is not None and "add_event" not in vars(file):
            file.add_event = partial(self._add_event, file.add_event)
        return writer

    def _add_event(self, add_event: Any, event: Any, step: int | None = None, walltime: float | None = None) -> None:
        add_event(event, step, time.time() - self.waited_s if walltime is None else walltime)

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self.waited_s:
            self.experiment._get_file_writer()  # opens a new file if an earlier fit has closed it
        super().log_metrics({card(key): value for key, value in metrics.items()}, step)
