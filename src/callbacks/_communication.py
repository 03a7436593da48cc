"""How long a step under DDP only waits for gradients."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ._timer import HostClock

WARMUP = 5  # exchanges that are left out of the result; DDP settles the order of its buckets in the first ones


class Exchanges:
    """Measures, under DistributedDataParallel, what the exchange of gradients adds to a step; nothing elsewhere.

    DDP sends a bucket of gradients as soon as it is full, while the backward pass computes others. The measured time
    begins with the last gradient, when nothing is left to compute, and ends with the backward pass: it is the part of
    the exchange that is not hidden behind arithmetic, and the wait for slower ranks. It is a part of
    `time/backward_ms`. On CUDA both ends are events of the device.

    DDP itself is not changed. In the first steps a hook on every parameter notes when its gradient comes; from then on
    only the parameter with the last gradient has one.

    Args:
        trainer: whose training begins.
        clock: of the device that trains.
    """

    def __init__(self, trainer: Trainer, clock: HostClock):
        self._clock = clock
        self._model: Any = trainer.strategy.model
        self._hooks: list[Any] = []
        self._last: tuple[Tensor, Any] | None = None  # the last gradient so far in this step, and when it came
        self._left_out = 0  # exchanges so far that are not in the result
        self._pending: deque[tuple[Any, Any]] = deque()
        self._counted, self._ms = 0, 0.0
        self._bytes = 0
        if trainer.world_size > 1 and isinstance(self._model, DistributedDataParallel):
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            self._bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self._hook(trained)

    def _hook(self, parameters: Sequence[Tensor]) -> None:
        self.stop()
        # Called before DDP's own hook, which sends the bucket.
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._came) for parameter in parameters]

    def _came(self, parameter: Tensor) -> None:
        if self._last is not None:
            self._clock.reuse([self._last[1]])
        self._last = (parameter, self._clock.mark())

    def end_backward(self) -> None:
        """The backward pass of a batch is over."""
        last, self._last = self._last, None
        if last is None or not self._model.require_backward_grad_sync:  # gradients are still being accumulated
            return
        if self._left_out < WARMUP:
            self._left_out += 1
            if self._left_out == WARMUP:
                self._hook([last[0]])
            return
        self._pending.append((last[1], self._clock.mark()))
        while self._pending and self._clock.ready(self._pending[0][1]):
            self._count()

    def _count(self) -> None:
        marks = self._pending.popleft()
        self._counted += 1
        self._ms += self._clock.elapsed_ms(*marks)
        self._clock.reuse(marks)

    def stop(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def facts(self) -> dict[str, float]:
        """What this rank has measured, which waits for the device; empty if nothing was.

        Returns:
            `communication_ms`: mean of an exchange; `gradient_bytes`: what every rank gives into it.
        """
        while self._pending:
            self._clock.wait(self._pending[0][1])
            self._count()
        if not self._counted:
            return {}
        return {"communication_ms": self._ms / self._counted, "gradient_bytes": self._bytes}
