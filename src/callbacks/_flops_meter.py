"""What MFU is made of: the FLOPs of a sample, and the peak of the device that trains."""

from collections.abc import Mapping

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from ..hardware.calibration import Calibration, peak_flops_per_sec
from ..hardware.datasheet import datasheet
from ..hardware.devices import device_name
from ..hardware.flops import UncountableError
from ..hardware.measure import find_calibration
from ._batches import varies
from ._recording import RecordedUpdates


class FlopsMeter:
    """Knows the FLOPs of a sample (given, or once recorded), and the peak once the device is calibrated."""

    def __init__(self, flops_per_sample: float | None):
        self._given = flops_per_sample
        self.calibration: Calibration | None = None
        self.peak: float | None = None  # FLOP/s at the run's precision, as measured
        self.datasheet_peak: float | None = None  # the same, dense, by the datasheet of a known device
        self._no_peak = "this device's peak could not be measured"
        self.per_sample = self._given
        self.is_known = self._given is not None
        self._reason = "no step was recorded"

    @property
    def is_recorded(self) -> bool:
        """Whether the FLOPs of a sample were recorded in this fit, and not given."""
        return self._given is None and self.per_sample is not None

    def calibrate(self, trainer: Trainer, module: LightningModule, measure: bool) -> None:
        """Find the peak: from the cache, or if `measure` by a measurement on rank 0, before the first step."""
        self.calibration = find_calibration(trainer.strategy.root_device, measure and trainer.is_global_zero)
        self._find_peaks(trainer, module)
        self._no_peak = f"the peak at precision {trainer.precision} was not measured here"
        if self.calibration is not None and self.calibration.disturbed:
            self._no_peak = f"the device's peak is not known: {self.calibration.disturbed}"
        if self.calibration is None:
            self._no_peak = "this device's peak was not measured before" + ("" if measure else ", and calibrate=False")

    def learn(self, trainer: Trainer, module: LightningModule, recorded: RecordedUpdates) -> None:
        """Take the FLOPs of a sample from the recorded updates; one warning where these have none. Sequences of different
        lengths have none either."""
        if self.is_known:
            return
        self.is_known = True
        try:
            if varies(module):
                raise UncountableError("sequences of different lengths take different numbers of FLOPs")
            found = recorded.flops()
        except UncountableError as error:
            self._reason = str(error)
            if recorded.reason is None and not varies(module):
                rank_zero_warn(
                    f"The FLOPs of {type(module).__name__} cannot be counted, so there is no FLOP/s and no MFU: {error}"
                )
            return
        self.per_sample = found.total
        self._find_peaks(trainer, module, found.shares)

    def _find_peaks(self, trainer: Trainer, module: LightningModule, shares: Mapping[str, float] | None = None) -> None:
        device, precision = trainer.strategy.root_device, trainer.precision
        known = self.calibration if self.calibration and not self.calibration.disturbed else None
        self.peak = peak_flops_per_sec(known, precision, module, shares) if known else None
        stated = device.type == "cuda"
        self.datasheet_peak = datasheet_peak(device_name(device), precision, module, shares) if stated else None

    def missing(self) -> dict[str, str]:
        """Why FLOP/s or MFU are not among the facts."""
        if not self.per_sample:
            return {"flops_per_sec": self._reason, "mfu": self._reason}
        return {} if self.peak else {"mfu": self._no_peak}

    def facts(self, samples_per_sec: float) -> dict[str, float]:
        """FLOP/s and MFU of one rank that trains so many samples/s, as far as they are known."""
        if not self.per_sample:
            return {}
        facts = {"flops_per_sample": self.per_sample, "flops_per_sec": self.per_sample * samples_per_sec}
        if self.peak:
            facts |= {"peak_flops_per_sec": self.peak, "mfu": facts["flops_per_sec"] / self.peak}
        if self.datasheet_peak:
            facts["mfu_of_datasheet"] = facts["flops_per_sec"] / self.datasheet_peak
        return facts


def datasheet_peak(
    device_name: str,
    precision: str | int | None = None,
    module: nn.Module | None = None,
    shares: Mapping[str, float] | None = None,
) -> float | None:
    """The dense peak in FLOP/s that the datasheet states for a training step.

    Args:
        device_name: as torch reports it.
        precision, module, shares: as `peak_flops_per_sec` takes them. torch's switches decide between fp32 and TF32.

    Returns:
        None for an unknown card, and for a precision that it has no hardware for.
    """
    card = datasheet(device_name)
    if card is None:
        return None
    stated = Calibration("cuda", device_name, None, "", None, matmul_flops_per_sec=card.flops_per_sec)
    return peak_flops_per_sec(stated, precision, module, shares)
