"""StepWriter: writes the scalars of many steps to a trainer's loggers at once, each at its own step."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from tensorboard.compat.proto.summary_pb2 import Summary

from .._lightning import prefixed_keys
from ..errors import in_one_line
from ..records.metrics import card
from ._timer import pause
from .step_file import StepFile
from .tensorboard import TensorBoard

POINTS = 1000  # a tag: about as many as TensorBoard shows

Row = tuple[int, Mapping[str, float]]  # a step, and its scalars


class StepWriter:
    """Writes scalars to a trainer's loggers, on rank 0.

    TensorBoard (one event with all values) and MLflow (one request) get every n-th step, other loggers every step. n is 1 in
    the first 1,000 steps, and doubles whenever the number of steps does. The choice depends only on the numbers of the
    steps, so a resumed run continues the series.

    After an exception a logger gets nothing more from this writer, with one warning.

    Args:
        trainer: has the loggers.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._failed_loggers: list[Logger] = []
        self._last_cell: tuple[int, int] | None = None
        if trainer.global_step:  # the run is resumed: continue the series
            self._starts_cell(trainer.global_step)

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, in the order of their steps, and flush them to the files of TensorBoard and CSV."""
        rows = [row for row in rows if row[1]]
        if not self._trainer.is_global_zero or not rows:
            return
        shown = [row for row in rows if self._starts_cell(row[0])]
        with pause(self._trainer):
            for logger in self._trainer.loggers:
                if not any(logger is failed for failed in self._failed_loggers):
                    self._write_to(logger, rows, shown)

    def _write_to(self, logger: Logger, rows: Sequence[Row], shown: Sequence[Row]) -> None:
        log_metrics = getattr(type(logger), "log_metrics", None)  # a logger that overrides it gets every step
        try:
            if isinstance(logger, StepFile):
                logger.append(rows)
            elif log_metrics in (TensorBoard.log_metrics, TensorBoardLogger.log_metrics):
                _write_events(logger, shown)
            else:  # MLflow sends a request to its server for each step
                for step, values in shown if log_metrics is MLFlowLogger.log_metrics else rows:
                    logger.log_metrics(dict(values), step)
        except Exception as error:  # noqa: BLE001 - anybody's logger
            self._failed_loggers.append(logger)
            with suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"{type(logger).__name__} gets no more curves: {in_one_line(error)}")

    def _starts_cell(self, step: int) -> bool:
        """Whether TensorBoard gets a step, as the first one in a cell of n steps; keep the cell."""
        stride = 2 ** math.ceil(math.log2(max(step / POINTS, 1)))
        previous, self._last_cell = self._last_cell, (stride, step // stride)
        return self._last_cell != previous


def _write_events(logger: Any, rows: Sequence[Row]) -> None:
    """Write one event a step with all values: several times cheaper than one `add_scalar` a value, and shown the same."""
    file_writer = logger.experiment._get_file_writer()  # opens a new file if an earlier fit has closed it
    for step, values in rows:
        keys = prefixed_keys(logger, [card(key) for key in values] if isinstance(logger, TensorBoard) else [*values])
        pairs = zip(keys, values.values(), strict=True)
        file_writer.add_summary(Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in pairs]), step)
    file_writer.flush()
