"""Writing many steps' scalars to a trainer's loggers at once, each at its own step."""

from collections.abc import Iterable, Mapping

import lightning
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary

Row = tuple[int, Mapping[str, float]]


def write_steps(trainer: lightning.Trainer, rows: Iterable[Row]) -> None:
    """Write `(step, {key: value})` rows.

    TensorBoard gets one event a step with all its values: several times cheaper than an `add_scalar` for each, and
    shown the same.
    """
    if not trainer.is_global_zero:
        return
    rows = list(rows)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            writer = logger.experiment._get_file_writer()
            for step, scalars in rows:
                values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
                writer.add_summary(Summary(value=values), step)
        else:
            for step, scalars in rows:
                logger.log_metrics(dict(scalars), step)
