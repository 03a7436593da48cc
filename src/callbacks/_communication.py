"""How long a step under DDP only waits for other ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._lightning import compiler_context
from ._timer import StepTimer

WARMUP = 5  # exchanges that are not measured; DDP settles the order of its buckets in the first ones


class _Hook:
    """A forward hook of a module. A copy of the module, or its pickle, has one that does nothing."""

    def __init__(self, call: Callable[[], None] | None = None):
        self._call = call

    def __call__(self, *_: Any) -> None:
        if self._call is not None:
            self._call()

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


class Exchanges:
    """Marks, under DistributedDataParallel, the waits for other ranks in a batch (`Batch.waits`); nothing elsewhere.

    DDP sends a bucket of gradients as soon as it is full, while the backward pass computes others. The measured time
    begins with the last gradient, when nothing is left to compute, and ends with the backward pass: it is the part of
    the exchange that is not hidden behind arithmetic, and the wait for slower ranks. It is a part of
    `time/backward_ms`. A module with buffers gets those of rank 0 before its forward pass; that wait is a part of
    `time/forward_ms`. On CUDA all marks are events of the device.

    DDP itself is not changed. In the first steps a hook on every parameter notes when its gradient comes; from then on
    only the parameter with the last gradient has one. Hooks on DDP and on the module note when their forward passes begin.

    Args:
        trainer: whose training begins.
        timer: of its steps.
    """

    def __init__(self, trainer: Trainer, timer: StepTimer):
        self._timer = timer
        self._model: Any = trainer.strategy.model
        self._hooks: list[Any] = []
        self._entered: Any = None  # when DDP's forward pass was called, in which the module's own has not begun
        self._last: tuple[Tensor, Any] | None = None  # the last gradient so far in this step, and when it came
        self._settling = WARMUP  # exchanges until the waits are measured
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

    def _enter(self) -> None:
        """DDP's forward pass is called."""
        if self._model.will_sync_module_buffers():
            self._entered = self._timer.clock.mark()

    def _begin_forward(self) -> None:
        """The module's own forward pass begins."""
        if self._entered is not None:  # else `training_step` calls its own module
            self._wait_ends(self._entered)
            self._entered = None

    def end_backward(self) -> None:
        """The backward pass of a batch is over."""
        last, self._last = self._last, None
        if not self._hooks or not self._model.require_backward_grad_sync:  # gradients are still being accumulated
            return
        if last is None:  # the last parameter has no gradient this time: nobody knows when the exchange began
            if self._timer.current is not None:
                self._timer.current.waits = []
        elif not self._settling:
            self._wait_ends(last[1])
        else:
            self._settling -= 1
            if not self._settling:
                self._hook([last[0]])
                # A module that is compiled itself would be compiled anew, with the hook.
                if self._model.modules_buffers and compiler_context(self._model.module) is None:
                    forward = (self._model, self._enter), (self._model.module, self._begin_forward)
                    self._hooks += [module.register_forward_pre_hook(_Hook(call)) for module, call in forward]

    def _wait_ends(self, begin: Any) -> None:
        if self._timer.current is not None:
            self._timer.current.waits += [begin, self._timer.clock.mark()]

    def stop(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
