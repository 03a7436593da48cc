"""Record the operations of a few training steps, in the run itself: its FLOPs, and the evidence for its bottleneck."""

from collections.abc import Callable, Sequence

from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from .._lightning import compiler_context
from .._torch import any_mode, end_mode, has_compiled, is_compiled
from ..errors import in_one_line
from ..hardware.flops import StepFlops, UncountableError, flops_per_sample
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
        self._watches = self._active = self._is_compiled = False
        self._reset()

    def _reset(self) -> None:
        self._is_refused = False  # because another recorder was active
        self._update = 0  # the last that was watched
        self._begun = 0  # the last that was begun
        self._samples: list[float] = []  # of each watched update

    def attach(
        self, trainer: Trainer, module: LightningModule, cache_bytes: int | None, part: Callable[[], str]
    ) -> None:
        """Forget an earlier fit, and prepare for the trainer's."""
        self._reset()
        self._recorder = OperationRecorder(module, cache_bytes, part)
        self._watches = self._wanted and can_be_watched(trainer, module)
        self._is_compiled = self._wanted and is_compiled_module(module)

    @property
    def last(self) -> int:
        """The last update that is watched; 0 if none is."""
        return LAST if self._watches else 0

    @property
    def active(self) -> bool:
        """Whether operations are being recorded."""
        return self._active

    @property
    def is_over(self) -> bool:
        """Whether no update will be recorded any more."""
        return not self._watches or self._begun > LAST

    def start(self, update: int, samples: float = 0) -> None:
        """Begin to record a batch of so many samples, if it is of an update that is watched; the first update is 1."""
        if not self._watches or self._active:
            return
        self._begun = update
        if not FIRST <= update <= LAST or has_compiled():
            return
        if any_mode():  # of another callback, which may end within the step, and would end this one instead
            self._is_refused = True
            return
        if update != self._update:
            self._recorder.next_step()
            self._samples.append(0)
            self._update = update
        self._samples[-1] += samples
        self._recorder.__enter__()
        self._active = True

    def stop(self) -> None:
        """End the recording of a batch, also where the step has left modes of its own behind."""
        if self._active:
            self._active = False
            end_mode(self._recorder)

    @property
    def reason(self) -> str | None:
        """Why nothing was recorded; None where something was."""
        if self._recorder.error is not None:
            return in_one_line(self._recorder.error)
        if any(self._recorder.steps):
            return None
        if not self._wanted:
            return "record_operations=False"
        if self._is_compiled:
            return "torch.compile runs nothing compiled under a recorder"
        if not self._watches:
            return "the parameters are sharded"
        if has_compiled():
            return "this process has used torch.compile"
        if self._is_refused:
            return "another recorder of operations was active"
        return f"recording begins with update {FIRST}"

    def operations(self) -> Sequence[Operation]:
        """The operations of a step; none where no step was watched, or where the recorder failed."""
        return self._recorder.operations()

    def flops(self) -> StepFlops:
        """The FLOPs of a sample in the recorded updates.

        Raises:
            UncountableError: where none was recorded, one of their operations has no formula, or they differ.
        """
        if self.reason is not None:
            raise UncountableError(self.reason)
        if self._recorder.uncounted is not None:
            raise UncountableError(f"the FLOPs of {self._recorder.uncounted} are not known")
        if not all(self._samples):
            raise UncountableError("the batch has no tensors; batch_size_fn says how many samples it has")
        return flops_per_sample(list(zip(self._recorder.steps, self._samples, strict=True)))


def can_be_watched(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a recorder sees the operations that would run without it: neither compiled nor sharded ones."""
    return type(trainer.strategy) in (SingleDeviceStrategy, DDPStrategy) and not is_compiled_module(module)


def is_compiled_module(module: LightningModule) -> bool:
    """Whether torch.compile has compiled a module or a part of it."""
    return compiler_context(module) is not None or any(map(is_compiled, module.modules()))
