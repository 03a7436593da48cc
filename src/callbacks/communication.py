"""CommunicationMonitor: how long a step under DDP only waits for gradients."""

from collections import deque
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ._never_raise import never_raise
from ._timer import HostClock, clock_for

WARMUP = 5  # exchanges that are left out of the result; DDP settles the order of its buckets in the first ones


class CommunicationMonitor(Callback):
    """Measures, under DistributedDataParallel, what the exchange of gradients adds to a step.

    DDP sends a bucket of gradients as soon as it is full, while the backward pass computes others. The measured time
    begins with the last gradient, when nothing is left to compute, and ends with the backward pass: it is the part of
    the exchange that is not hidden behind arithmetic, and the wait for slower ranks. It is a part of
    `time/backward_ms`. On CUDA both ends are events of the device.

    DDP itself is not changed. In the first steps a hook on every parameter notes when its gradient comes; from then on
    only the parameter with the last gradient has one.
    """

    observes_only = True

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._clock = HostClock()
        self._last: tuple[Tensor, Any] | None = None  # the last gradient so far in this step, and when it came
        self._left_out = 0  # exchanges so far that are not in the result
        self._pending: deque[tuple[Any, Any]] = deque()
        self._counted = 0
        self._ms = 0.0
        self._bytes = 0

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.disable()
        model = trainer.strategy.model
        if trainer.world_size > 1 and isinstance(model, DistributedDataParallel):
            trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._clock = clock_for(trainer.strategy.root_device)
            self._bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self._hook(trained)

    def _hook(self, parameters: list[Tensor]) -> None:
        for hook in self._hooks:
            hook.remove()
        # Called before DDP's own hook, which sends the bucket.
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._came) for parameter in parameters]

    def _came(self, parameter: Tensor) -> None:
        if self._last is not None:
            self._clock.reuse([self._last[1]])
        self._last = (parameter, self._clock.mark())

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last, self._last = self._last, None
        model: Any = trainer.strategy.model
        if last is None or not model.require_backward_grad_sync:  # gradients are still being accumulated
            return
        if self._left_out < WARMUP:
            self._left_out += 1
            if self._left_out == WARMUP:
                self._hook([last[0]])
            return
        self._pending.append((last[1], self._clock.mark()))
        self._count(wait=False)

    def _count(self, wait: bool) -> None:
        """Turn marks into numbers, as far as they can be read without waiting."""
        while self._pending and (wait or self._clock.ready(self._pending[0][1])):
            start, end = self._pending.popleft()
            if wait:
                self._clock.wait(end)
            self._counted += 1
            self._ms += self._clock.elapsed_ms(start, end)
            self._clock.reuse([start, end])

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._hook([])

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._hook([])

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._hook([])
        self._reset()

    def result(self) -> dict[str, float]:
        """What this rank has measured; empty if nothing was.

        Returns:
            `communication_ms`: mean of an exchange; `gradient_bytes`: what every rank gives into it.
        """
        self._count(wait=True)
        if not self._counted:
            return {}
        return {"communication_ms": self._ms / self._counted, "gradient_bytes": self._bytes}
