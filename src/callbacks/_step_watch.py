"""Record the operations of a few training steps, in the run itself, as the evidence for its bottleneck."""

from collections.abc import Callable, Sequence

from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from .._lightning import compiler_context
from .._torch import any_mode, end_mode, has_compiled, is_compiled
from ..hardware.operations import Operation, OperationRecorder

FIRST, LAST = 2, 4  # the updates that are watched: the first one pays for one-time work


class StepWatch:
    """Watches the updates `FIRST` to `LAST` of a fit. A watched step is slower, and no rate is read from it.

    A compiled module is not watched, because torch.compile runs nothing compiled under a recorder. Nor is a module whose
    parameters are sharded.
    """

    def __init__(self, wanted: bool):
        self._wanted = wanted
        self._recorder = OperationRecorder()
        self._watches = self._active = False
        self._update = 0  # the last that was begun

    def attach(
        self, trainer: Trainer, module: LightningModule, cache_bytes: int | None, part: Callable[[], str]
    ) -> None:
        """Forget an earlier fit, and prepare for the trainer's."""
        self._recorder = OperationRecorder(module, cache_bytes, part)
        self._watches = self._wanted and can_be_watched(trainer, module)
        self._update = 0

    @property
    def last(self) -> int:
        """The last update that is watched; 0 if none is."""
        return LAST if self._watches else 0

    @property
    def active(self) -> bool:
        """Whether operations are being recorded."""
        return self._active

    def start(self, update: int) -> None:
        """Begin to record a batch, if it is of an update that is watched; the first update is 1."""
        if not self._watches or self._active or not FIRST <= update <= LAST or has_compiled():
            return
        if any_mode():  # of another callback, which may end within the step, and would end this one instead
            return
        if update != self._update:
            self._recorder.next_step()
            self._update = update
        self._recorder.__enter__()
        self._active = True

    def stop(self) -> None:
        """End the recording of a batch, also where the step has left modes of its own behind."""
        if self._active:
            self._active = False
            end_mode(self._recorder)

    @property
    def reason(self) -> str | None:
        """Why nothing was recorded, if the recorder failed."""
        error = self._recorder.error
        return None if error is None else f"{type(error).__name__}: {error}"

    def operations(self) -> Sequence[Operation]:
        """The operations of a step; none where no step was watched, or where the recorder failed."""
        return self._recorder.operations()


def can_be_watched(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a recorder sees the operations that would run without it: neither compiled nor sharded ones."""
    return (
        type(trainer.strategy) in (SingleDeviceStrategy, DDPStrategy)
        and compiler_context(module) is None
        and not any(map(is_compiled, module.modules()))
    )
