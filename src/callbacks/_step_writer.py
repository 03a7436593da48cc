"""Write many steps' scalars to a trainer's loggers at once, each at its own step."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary

from .._lightning import append_csv_rows, prefixed
from .._tensorboard import append_to_event_file
from ._event_records import event_records
from ._exclusions import writing

Row = tuple[int, Mapping[str, float]]


def write_steps(trainer: Trainer, rows: Iterable[Row]) -> None:
    """Write `(step, {key: value})` rows on rank 0. After the call the files of TensorBoard and CSV hold them.

    TensorBoard gets one event a step that holds all values: several times cheaper than an `add_scalar` for each, and
    shown the same.
    """
    if not trainer.is_global_zero:
        return
    rows = list(rows)
    if not rows:
        return
    with writing(trainer):
        for logger in trainer.loggers:
            _write(logger, rows)


def _write(logger: Logger, rows: Sequence[Row]) -> None:
    # A subclass that overrides `log_metrics` changes what is written, so its method gets every step.
    if isinstance(logger, CSVLogger) and type(logger).log_metrics is CSVLogger.log_metrics:
        for keys, steps, values in _alike(rows):
            lines = [[*row, step] for step, row in zip(steps, values, strict=True)]
            append_csv_rows(logger, [*keys, "step"], lines)
    elif (
        isinstance(logger, TensorBoardLogger)
        and type(logger).log_metrics is TensorBoardLogger.log_metrics
        # A writer that an earlier fit has closed has no file; Lightning's own `log_metrics` opens a new one.
        and logger.experiment.file_writer is not None
    ):
        _write_events(logger, logger.experiment.file_writer, rows)
    else:
        for step, scalars in rows:
            logger.log_metrics(dict(scalars), step)


def _write_events(logger: TensorBoardLogger, file_writer: Any, rows: Sequence[Row]) -> None:
    for names, steps, values in _alike(rows):
        keys = prefixed(logger, names)
        with numpy.errstate(over="ignore"):  # a number that float32 cannot hold is infinite there
            numbers = numpy.array(values).astype(numpy.float32)
        if not append_to_event_file(file_writer, event_records(keys, steps, numbers, time.time())):
            for step, row in zip(steps, values, strict=True):
                scalars = [Summary.Value(tag=key, simple_value=value) for key, value in zip(keys, row, strict=True)]
                file_writer.add_summary(Summary(value=scalars), step)


def _alike(rows: Iterable[Row]) -> Iterator[tuple[tuple[str, ...], list[int], list[list[float]]]]:
    """Successive rows with the same keys: the keys (K,), the steps (N,) and the values (N, K); K is at least 1."""
    for keys, group in itertools.groupby(rows, key=lambda row: tuple(row[1])):
        if keys:
            pairs = list(group)
            yield keys, [step for step, _ in pairs], [list(scalars.values()) for _, scalars in pairs]
