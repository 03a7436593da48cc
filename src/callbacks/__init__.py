"""Lightning callbacks that measure and show; each works in any Lightning project."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .curves import TrainCurves as TrainCurves
    from .device import DeviceMonitor as DeviceMonitor
    from .memory import MemoryMonitor as MemoryMonitor
    from .noise_scale import NoiseScaleMonitor as NoiseScaleMonitor
    from .nonfinite import StopOnNonFinite as StopOnNonFinite
    from .prediction_images import PredictionImages as PredictionImages
    from .profile import OperationProfiler as OperationProfiler
    from .progress import ProgressBar as ProgressBar
    from .throughput import ThroughputMonitor as ThroughputMonitor
    from .until_known import StopWhenKnown as StopWhenKnown
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
