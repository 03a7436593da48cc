"""batchscope: train a small zoo of networks with one command, and see what every step cost and why.

Importing the package is cheap: torch and Lightning are imported with the first name that needs them.
"""

from typing import TYPE_CHECKING

from ._lazy import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .analysis.answer_file import read_answer as read_answer
    from .analysis.read import read_runs as read_runs
    from .callbacks.curves import TrainCurves as TrainCurves
    from .callbacks.device import DeviceMonitor as DeviceMonitor
    from .callbacks.nonfinite import StopOnNonFinite as StopOnNonFinite
    from .callbacks.profile import OperationProfiler as OperationProfiler
    from .callbacks.progress import ProgressBar as ProgressBar
    from .callbacks.throughput import ThroughputMonitor as ThroughputMonitor
    from .callbacks.until_known import StopWhenKnown as StopWhenKnown
    from .callbacks.wait_until_quiet import WaitUntilQuiet as WaitUntilQuiet
    from .errors import UserError as UserError
    from .inference.load import load_model as load_model
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
