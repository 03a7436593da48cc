"""How a run ended: the word in its record, and the reason in one line."""

from typing import Literal

from ..errors import UserError
from ..files import WriteError

# `interrupted`: stopped by a signal, or the system refused to write a file; `killed`: ended without a chance to report.
Status = Literal["planned", "running", "finished", "failed", "out_of_memory", "interrupted", "killed"]
OPEN = ("planned", "running")  # the statuses of a run that has not ended, or has not reported its end


def ended_as(error: BaseException | None) -> Status:
    """The status of a run that ended with this exception, or with none."""
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Lightning turns Ctrl-C into SystemExit
        return "interrupted"
    if "OutOfMemoryError" in type(error).__name__ or isinstance(error, MemoryError):
        return "out_of_memory"
    if isinstance(error, WriteError):  # the run can be resumed once there is room or permission
        return "interrupted"
    return "failed"


def reason(error: BaseException) -> str:
    """The exception in one line; anything but a user's mistake with its type."""
    text = " ".join(str(error).split())
    return (text if isinstance(error, UserError) else f"{type(error).__name__}: {text}")[:1000]
