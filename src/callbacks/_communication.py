"""Exchanges: times how long a step under DDP waits for other ranks."""

from collections.abc import Sequence
from typing import Any

from lightning import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ._timer import StepTimer

WARMUP = 5  # exchanges that are not measured: DDP settles the order of its buckets in the first ones


class Exchanges:
    """Marks, under DistributedDataParallel, the waits for other ranks in a batch (`Batch.waits`); nothing elsewhere.

    DDP sends a bucket of gradients as soon as it is full, while the backward pass computes others. The measured time
    begins with the last gradient, when nothing is left to compute, and ends with the backward pass. So it is the part of
    the exchange that no computation hides, including the wait for slower ranks. It is a part of `time/backward_ms`. On CUDA
    all marks are events of the device.

    DDP itself is not changed. In the first steps every parameter has a hook that marks when its gradient is computed; from
    then on only the parameters that had the last gradient of a backward pass have this hook.

    Args:
        trainer: of the training that begins.
        timer: times its steps.
    """

    def __init__(self, trainer: Trainer, timer: StepTimer):
        self._timer = timer
        self._model: Any = trainer.strategy.model
        self._hooks: list[Any] = []
        self._last_gradient: tuple[Tensor, Any] | None = None  # the parameter of the step's latest one, and its mark
        self._num_warmup_left = WARMUP  # exchanges before the first measured one
        self._last_parameters: set[Tensor] = set()  # of the warm-up's backward passes, which may have different ones
        if trainer.world_size > 1 and isinstance(self._model, DistributedDataParallel):
            self._register_hooks([parameter for parameter in self._model.parameters() if parameter.requires_grad])

    def _register_hooks(self, parameters: Sequence[Tensor]) -> None:
        self.stop()
        # These hooks run before DDP's own hook, which sends the bucket.
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._mark_gradient) for parameter in parameters]

    def _mark_gradient(self, parameter: Tensor) -> None:
        if self._last_gradient is not None:
            self._timer.clock.reuse([self._last_gradient[1]])
        self._last_gradient = (parameter, self._timer.clock.mark())

    def end_backward(self) -> None:
        """Mark the end of a batch's backward pass."""
        gradient, self._last_gradient = self._last_gradient, None
        # Without a gradient of the last parameter the start of the exchange is unknown.
        if gradient is None or not self._model.require_backward_grad_sync:  # gradients are still being accumulated
            return
        if self._num_warmup_left:
            self._last_parameters.add(gradient[0])
            self._num_warmup_left -= 1
            if not self._num_warmup_left:
                self._register_hooks([*self._last_parameters])
        elif self._timer.current is not None:
            self._timer.current.waits += [gradient[1], self._timer.clock.mark()]

    def stop(self) -> None:
        """Stop measuring."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
