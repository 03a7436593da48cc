"""The parts of a training step, in the order in which they happen. Their times add up to that of the step."""

from enum import StrEnum


class StepPart(StrEnum):
    """Where the wall time of a step goes; `time/<part>_ms` is its metric, and `parts_ms.<part>` its key in a record."""

    DATA_WAIT = "data_wait"
    TRANSFER = "transfer"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


PARTS = tuple(part.value for part in StepPart)
SHORT_NAMES = ("wait", "copy", "fwd", "bwd", "opt", "other")  # of the parts, in column headings
