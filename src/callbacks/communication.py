"""CommunicationMonitor: how long a step of several processes does nothing but wait for their gradients."""

from collections import Counter, deque
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..options.types import PositiveInt
from ._never_raise import never_raise
from ._stopwatch import Clock, clock_for


class CommunicationMonitor(Callback):
    """Measures, under DistributedDataParallel, what the exchange of gradients adds to a step.

    DDP sends gradients as soon as a bucket of them is full, while the backward pass goes on with others. What is
    measured begins with the last gradient of all, when nothing is left to compute, and ends with the backward pass,
    which waits for the others: the part of the exchange that is not hidden behind arithmetic, and the wait for
    processes that are slower. It is a part of `time/backward_ms`. On CUDA both ends are events of the device.

    DDP itself is not touched. In the first steps every parameter says when its gradient has come; from then on only
    the one that comes last does.

    Args:
        warmup_steps: how many exchanges tell which gradient comes last; they are left out of the result.
    """

    observes_only = True

    def __init__(self, warmup_steps: PositiveInt = 5):
        self.warmup_steps = warmup_steps
        self._forget()

    def _forget(self) -> None:
        self._clock: Clock | None = None
        self._hooks: list[Any] = []
        self._last: tuple[nn.Parameter, Any] | None = None  # whose gradient came last so far in this step, and when
        self._came_last: Counter[nn.Parameter] = Counter()
        self._pending: deque[tuple[Any, Any]] = deque()
        self._counted = 0
        self._ms = 0.0
        self._bytes = 0

    @never_raise
    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin anew, whatever an earlier fit has left."""
        self.disable()
        model = trainer.strategy.model
        if trainer.world_size > 1 and isinstance(model, DistributedDataParallel):
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._clock = clock_for(trainer.strategy.root_device)
            self._bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self._listen_to(trained)

    def _listen_to(self, parameters: list[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        # Called before DDP's own hook, which sends the bucket.
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._came) for parameter in parameters]

    def _came(self, parameter: Tensor) -> None:
        if self._clock is not None:
            if self._last is not None:
                self._clock.reuse(self._last[1])
            self._last = (parameter, self._clock.mark())

    @never_raise
    def on_after_backward(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The gradients of all processes have come, unless they are still being accumulated."""
        last, self._last = self._last, None
        if last is None or not trainer.strategy.model.require_backward_grad_sync:
            return
        if self._came_last.total() < self.warmup_steps:
            self._came_last[last[0]] += 1
            if self._came_last.total() == self.warmup_steps:
                self._listen_to([self._came_last.most_common(1)[0][0]])
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
            for mark in (start, end):
                self._clock.reuse(mark)

    @never_raise
    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Leave the module as it was."""
        self._listen_to([])

    @never_raise
    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        self._listen_to([])

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._listen_to([])
        self._forget()

    def result(self) -> dict[str, float]:
        """What has been measured in this process; empty if nothing was.

        Returns:
            `communication_ms`: mean of an exchange; `gradient_bytes`: what every process gives into it.
        """
        if self._clock is not None:
            self._count(wait=True)
        if not self._counted:
            return {}
        return {"communication_ms": self._ms / self._counted, "gradient_bytes": self._bytes}
