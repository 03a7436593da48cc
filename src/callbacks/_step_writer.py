"""Write many steps' scalars to a trainer's loggers at once, each at its own step."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import Summary

from .._lightning import append_csv_rows, prefixed
from .._tensorboard import append_to_event_file
from ..records.metrics import metric
from ._event_records import event_records
from ._exclusions import writing

Row = tuple[int, Mapping[str, float]]


class Table(NamedTuple):
    """Scalars of N steps that have the same K keys; neither is 0."""

    keys: Sequence[str]
    steps: NDArray[numpy.int64]  # shape (N,)
    values: NDArray[numpy.float64]  # shape (N, K)


def write_steps(trainer: Trainer, rows: Iterable[Row], details: bool = True) -> None:
    """Write `(step, {key: value})` rows on rank 0. After the call the files of TensorBoard and CSV hold them.

    Without `details` TensorBoard gets no metric that is declared as a detail (records/metrics.py).

    TensorBoard gets one event a step that holds all values: several times cheaper than an `add_scalar` for each, and
    shown the same.
    """
    if trainer.is_global_zero:
        write_tables(trainer, list(_alike(rows)), details)


def write_tables(trainer: Trainer, tables: Sequence[Table], details: bool = True) -> None:
    """Write tables as `write_steps` writes rows."""
    if trainer.is_global_zero and tables:
        with writing(trainer):
            for logger in trainer.loggers:
                for table in tables:
                    _write(logger, table, details)


def _write(logger: Logger, table: Table, details: bool) -> None:
    # A subclass that overrides `log_metrics` changes what is written, so its method gets every step.
    if isinstance(logger, CSVLogger) and type(logger).log_metrics is CSVLogger.log_metrics:
        append_csv_rows(logger, [*table.keys, "step"], numpy.column_stack([table.values, table.steps.astype(float)]))
    elif (
        isinstance(logger, TensorBoardLogger)
        and type(logger).log_metrics is TensorBoardLogger.log_metrics
        # A writer that an earlier fit has closed has no file; Lightning's own `log_metrics` opens a new one.
        and logger.experiment.file_writer is not None
    ):
        _write_events(logger, logger.experiment.file_writer, table if details else _without_details(table))
    else:
        for step, values in _rows(table):
            logger.log_metrics(dict(zip(table.keys, values, strict=True)), step)


def _write_events(logger: TensorBoardLogger, file_writer: Any, table: Table) -> None:
    if not table.keys:
        return
    keys = prefixed(logger, table.keys)
    with numpy.errstate(over="ignore"):  # a number that float32 cannot hold is infinite there
        numbers = table.values.astype(numpy.float32)
    if not append_to_event_file(file_writer, event_records(keys, table.steps.tolist(), numbers, time.time())):
        for step, row in _rows(table):
            scalars = [Summary.Value(tag=key, simple_value=value) for key, value in zip(keys, row, strict=True)]
            file_writer.add_summary(Summary(value=scalars), step)


def _without_details(table: Table) -> Table:
    kept = [at for at, key in enumerate(table.keys) if not metric(key).detail]
    return Table([table.keys[at] for at in kept], table.steps, table.values[:, kept])


def _rows(table: Table) -> Iterator[tuple[int, list[float]]]:
    return zip(table.steps.tolist(), table.values.tolist(), strict=True)


def _alike(rows: Iterable[Row]) -> Iterator[Table]:
    """Successive rows with the same keys; a row without keys is left out."""
    for keys, group in itertools.groupby(rows, key=lambda row: tuple(row[1])):
        if keys:
            steps, scalars = zip(*group, strict=True)
            yield Table(keys, numpy.array(steps), numpy.array([list(row.values()) for row in scalars], float))
