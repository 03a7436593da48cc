"""StepWriter: writes the scalars of many steps to a trainer's loggers at once, each at its own step."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy
from lightning import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import Summary

from .._lightning import prefixed
from ..errors import in_one_line
from ..records.metrics import card
from ._timer import pause
from .step_file import StepFile
from .tensorboard import TensorBoard

POINTS = 1000  # of a tag: TensorBoard shows about so many

Row = tuple[int, Mapping[str, float]]
Kind = TypeVar("Kind", bound=Logger)


class Scalars(NamedTuple):
    """The scalars of N steps that have the same K keys."""

    keys: Sequence[str]
    steps: NDArray[numpy.int64]  # shape (N,)
    values: NDArray[numpy.float64]  # shape (N, K)


class StepWriter:
    """Writes on rank 0.

    TensorBoard (one event with all values) and MLflow (a request) get every n-th step, other loggers every one. n is 1 in
    the first 1,000 steps, and doubles whenever the number of steps does. Which steps these are depends on their numbers
    alone, so a resumed run continues the series.

    A logger that raises an exception gets nothing more from this writer, with one warning.

    Args:
        trainer: whose loggers are written to.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._failed: list[Logger] = []
        self._last_cell: tuple[int, int] | None = None
        if trainer.global_step:  # resumed: the series goes on
            self._thinned(numpy.array([trainer.global_step]))

    def write_rows(self, rows: Iterable[Row]) -> None:
        """Write `(step, {key: value})`. After the call the files of TensorBoard and CSV hold them."""
        if self._trainer.is_global_zero:
            for scalars in _alike(rows):
                self.write(scalars)

    def write(self, scalars: Scalars) -> None:
        """Write scalars, in the order of their steps."""
        if not self._trainer.is_global_zero or not len(scalars.steps) or not scalars.keys:
            return
        shown = self._thinned(scalars.steps)
        with pause(self._trainer):
            for logger in self._trainer.loggers:
                if not any(logger is failed for failed in self._failed):
                    self._attempt(logger, scalars, shown)

    def _attempt(self, logger: Logger, scalars: Scalars, shown: NDArray[numpy.bool_]) -> None:
        try:
            _write(logger, scalars, shown)
        except Exception as error:  # noqa: BLE001 - anybody's logger
            self._failed.append(logger)
            with suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"{type(logger).__name__} gets no more curves: {in_one_line(error)}")

    def _thinned(self, steps: NDArray[numpy.int64]) -> NDArray[numpy.bool_]:
        """Which steps TensorBoard gets: the first of each cell of n steps."""
        stride = 2 ** numpy.ceil(numpy.log2(numpy.maximum(steps / POINTS, 1))).astype(int)
        cells = [*zip(stride.tolist(), (steps // stride).tolist(), strict=True)]
        shown = [cell != before for before, cell in itertools.pairwise([self._last_cell, *cells])]
        self._last_cell = cells[-1]
        return numpy.array(shown)


def is_plain(logger: Logger, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a logger writes as this class of Lightning's; one with its own `log_metrics` is asked for every step."""
    return isinstance(logger, kind) and logger.__class__.log_metrics is kind.log_metrics


def _write(logger: Logger, scalars: Scalars, shown: NDArray[numpy.bool_]) -> None:
    if isinstance(logger, StepFile):
        rows = numpy.column_stack([scalars.values, scalars.steps.astype(float)])
        logger.append([*scalars.keys, "step"], rows)
    # A writer that an earlier fit has closed has no file; Lightning's own `log_metrics` opens a new one.
    elif _has_event_file(logger):
        _write_events(logger, logger.experiment.file_writer, scalars, shown)
    else:
        taken = shown if is_plain(logger, MLFlowLogger) else slice(None)  # each step is a request to its server
        for step, values in zip(scalars.steps[taken].tolist(), scalars.values[taken].tolist(), strict=True):
            logger.log_metrics(dict(zip(scalars.keys, values, strict=True)), step)


def _has_event_file(logger: Logger) -> TypeGuard[TensorBoardLogger]:
    is_known = is_plain(logger, TensorBoard) or is_plain(logger, TensorBoardLogger)
    return is_known and logger.experiment.file_writer is not None


def _write_events(logger: TensorBoardLogger, file_writer: Any, scalars: Scalars, shown: NDArray[numpy.bool_]) -> None:
    """One event a step that holds all values: several times cheaper than an `add_scalar` for each, and shown the same."""
    names = [card(key) for key in scalars.keys] if isinstance(logger, TensorBoard) else scalars.keys
    keys = prefixed(logger, names)
    with numpy.errstate(over="ignore"):  # a number that float32 cannot hold is infinite there
        values = scalars.values[shown].astype(numpy.float32)
    for step, row in zip(scalars.steps[shown].tolist(), values.tolist(), strict=True):
        summary = Summary(
            value=[Summary.Value(tag=key, simple_value=value) for key, value in zip(keys, row, strict=True)]
        )
        file_writer.add_summary(summary, step)
    file_writer.flush()


def _alike(rows: Iterable[Row]) -> Iterator[Scalars]:
    """Successive rows with the same keys; a row without keys is left out."""
    for keys, group in itertools.groupby(rows, key=lambda row: tuple(row[1])):
        if keys:
            steps, scalars = zip(*group, strict=True)
            yield Scalars(keys, numpy.array(steps), numpy.array([list(row.values()) for row in scalars], float))
