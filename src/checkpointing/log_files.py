"""The log files of a run: complete at every checkpoint, and cut on resume after its step.

A killed run may have logged steps after its last checkpoint. The resumed run logs them again, with the same numbers.
"""

from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from .._lightning import logged_step
from ..callbacks.step_file import StepFile


def loggers_of_rank(trainer: Trainer) -> list[Logger]:
    """The loggers that write in this process: all of them on rank 0, none on the others."""
    return trainer.loggers if trainer.is_global_zero else []


def cut_logs(trainer: Trainer, steps: int) -> None:
    """Leave out what was logged after the checkpoint of so many steps, which the trainer has loaded.

    TensorBoard purges later steps when it reads. Its validation at the checkpoint is there twice, with equal numbers.
    """
    for logger in loggers_of_rank(trainer):
        if isinstance(logger, TensorBoardLogger):
            start: Any = Event(session_log=SessionLog(status=SessionLog.START))
            logger.experiment.file_writer.add_event(start, steps + 1)
        elif isinstance(logger, StepFile):
            logger.cut(steps, logged_step(trainer))
