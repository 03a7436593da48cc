"""How long a step under DDP only waits for other ranks."""

from collections.abc import Sequence
from typing import Any

from lightning import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ._timer import StepTimer

WARMUP = 5  # exchanges that are not measured; DDP settles the order of its buckets in the first ones


class Exchanges:
    """Marks, under DistributedDataParallel, the waits for other ranks in a batch (`Batch.waits`); nothing elsewhere.

    DDP sends a bucket of gradients as soon as it is full, while the backward pass computes others. The measured time
    begins with the last gradient, when nothing is left to compute, and ends with the backward pass: it is the part of
    the exchange that is not hidden behind arithmetic, and the wait for slower ranks. It is a part of
    `time/backward_ms`. On CUDA all marks are events of the device.

    DDP itself is not changed. In the first steps a hook on every parameter notes when its gradient comes; from then on
    only the parameters that had the last gradient of a backward pass have one.

    Args:
        trainer: whose training begins.
        timer: of its steps.
    """

    def __init__(self, trainer: Trainer, timer: StepTimer):
        self._timer = timer
        self._model: Any = trainer.strategy.model
        self._hooks: list[Any] = []
        self._last: tuple[Tensor, Any] | None = None  # the last gradient so far in this step, and when it came
        self._settling = WARMUP  # exchanges until the waits are measured
        self._ends: set[Tensor] = set()  # which had the last gradient of one of them: each backward pass has its own
        if trainer.world_size > 1 and isinstance(self._model, DistributedDataParallel):
            self._hook([parameter for parameter in self._model.parameters() if parameter.requires_grad])

    def _hook(self, parameters: Sequence[Tensor]) -> None:
        self.stop()
        # Called before DDP's own hook, which sends the bucket.
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._came) for parameter in parameters]

    def _came(self, parameter: Tensor) -> None:
        if self._last is not None:
            self._timer.clock.reuse([self._last[1]])
        self._last = (parameter, self._timer.clock.mark())

    def end_backward(self) -> None:
        """The backward pass of a batch is over."""
        last, self._last = self._last, None
        # Without a gradient of the last parameter nobody knows when the exchange began.
        if last is None or not self._model.require_backward_grad_sync:  # gradients are still being accumulated
            return
        if self._settling:
            self._ends.add(last[0])
            self._settling -= 1
            if not self._settling:
                self._hook([*self._ends])
        elif self._timer.current is not None:
            self._timer.current.waits += [last[1], self._timer.clock.mark()]

    def stop(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
