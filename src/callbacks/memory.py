"""MemoryMonitor: what takes the memory at the peak of a training step, and which batch size would fit."""

import gc
from typing import Any

import psutil
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from .._torch import living_fake_tensors
from ..errors import UserError
from ..hardware.memory import PARTS, MemoryCounter, StepMemory
from ..hardware.memory_limits import bytes_of, free_bytes, is_out_of_memory, measured_bytes
from ..records.formatting import memory
from ..records.terminal import block
from ._batches import samples_in, varies
from ._exclusions import measuring
from ._never_raise import never_raise
from ._setting import own_config
from ._step_watch import is_compiled_module

# Of the free memory a step may take so much by the count: kernels' workspaces and fragmentation are not counted.
USABLE = 0.9


class StateOutsideError(UserError):
    """A counted step has left tensors without memory where the real steps would find them."""


class MemoryMonitor(Callback):
    """Says what the memory at the peak of a training step consists of.

    With `count` a copy of the module runs one step on tensors without memory before the first real one (docs/measuring.md,
    Memory), in some tenths of a second. Nothing of the module, its optimizers or the random states changes. A step that
    keeps tensors outside of its module, such as a cached function, is not suited for this, and ends the fit with
    StateOutsideError. Without `count` the parts are those that exist after the second update, without activations, and a
    step is counted only when memory has run out.

    After the fit `facts` has the result, and `detail_lines` says it. When the fit runs out of memory, `facts["out_of_memory"]` says which part takes
    most, and the largest power of two of samples that would have fitted.
    """

    observes_only = True

    def __init__(self, count: bool = False, verbose: bool = True) -> None:
        self.count = count
        self.verbose = verbose  # whether the line is printed; `train.py` prints it among the details
        self.failure: str | None = None  # the exception that has ended the measurement
        self._reset()

    def _reset(self) -> None:
        self.facts: dict[str, Any] = {}
        self._counter: MemoryCounter | None = None
        self._free: int | None = None
        self._held = self._rss = 0
        self._active = self._has_seen_a_batch = False

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the facts, as `memory`."""
        return {"memory": self.facts}

    def detail_lines(self) -> list[str]:
        """For the details of a run: the peak and its parts."""
        return [self.line] if self.verbose and self.line else []

    @property
    def line(self) -> str:
        """The peak and its parts as far as they are known, and what is not counted; empty before that."""
        parts, measured = self.facts.get("parts_bytes"), self.facts.get("measured_bytes", {})
        if not parts:
            return f"memory  not counted: {self.facts['uncounted']}" if "uncounted" in self.facts else ""
        known = memory(sum(parts.values()), parts)
        is_counted = "peak_bytes" in self.facts
        line = f"memory  at the peak of a step {known} (counted)" if is_counted else f"memory  {known}"
        if "allocated" in measured:
            line += f"; measured {memory(measured['allocated'])}, reserved {memory(measured['reserved'])}"
        if reason := self.facts.get("uncounted"):
            line += f"; {'' if is_counted else 'the rest of the step is '}not counted: {reason}"
        return line

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        self.facts, self.failure = {"uncounted": "no batch was trained"}, None
        self._free = free_bytes(trainer.strategy.root_device)
        self._rss = psutil.Process().memory_info().rss
        # A resumed fit has the states of its optimizers already.
        self._held = bytes_of((*pl_module.parameters(), *pl_module.buffers(), *_optimizer_states(trainer)))
        self._active = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._active and not self._has_seen_a_batch:
            self._has_seen_a_batch = True
            gc.freeze()  # looking through every object takes most of a second: only those that counting makes are
            try:
                self._count(trainer, pl_module, batch)
                if self.count and living_fake_tensors() and gc.collect() >= 0 and living_fake_tensors():
                    raise StateOutsideError(
                        f"{type(pl_module).__name__} keeps tensors outside of the module (a cached function, a global), so "
                        f"its memory cannot be counted: write callbacks.memory.count=false, or MemoryMonitor(count=False)"
                    )
            finally:
                gc.unfreeze()

    @never_raise
    def _count(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        samples = samples_in(batch)
        if not samples:
            self.facts = {"uncounted": "the batch has no tensors"}
            return
        with measuring(trainer):
            self._counter = MemoryCounter(pl_module, batch, samples)
            self.facts = {"batch_size": self._counter.batch_size, "uncounted": "MemoryMonitor(count=False)"}
            compiled, lengths = is_compiled_module(pl_module), varies(pl_module)
            counted = self._counter.at() if self.count and not compiled and not lengths else None
        if counted is not None:
            self.facts = _facts_of(counted)
        if compiled:
            self.facts["uncounted"] = "a compiled step keeps other activations than the one that is counted"
        elif self.count and (counted is None or self._counter.optimizer_reason):
            reason = "the sequences have different lengths" if lengths else None
            self.facts["uncounted"] = reason or self._counter.reason or self._counter.optimizer_reason

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # After the second update the optimizer has its states, and a step is as every later one.
        if self._active and trainer.global_step >= 2 * max(1, len(trainer.optimizers)):
            self._active = False
            self._measure(trainer, pl_module)

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            self._measure(trainer, pl_module)
        if self.failure and "peak_bytes" not in self.facts:
            self.facts["uncounted"] = f"the measurement ended with {self.failure}"
        if trainer.is_global_zero and own_config(pl_module) is None:
            print("".join(f"\n{block([line])}\n" for line in self.detail_lines()), end="", flush=True)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if is_out_of_memory(exception) and trainer.training and self._counter is not None:
            self.facts["out_of_memory"] = {} if is_compiled_module(pl_module) else self._explanation(self._counter)

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.disable()

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._active, self._counter = False, None

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        """Add what the device tells, and the parts that exist, where they could not be counted."""
        measured = measured_bytes(trainer.strategy.root_device)
        if "process_peak" in measured:
            measured["process_growth"] = max(0, measured["process_peak"] - self._rss)
        self.facts["measured_bytes"] = measured
        if "uncounted" in self.facts:
            parameters = list(module.parameters())
            known = self.facts.setdefault("parts_bytes", {})
            known["parameters"] = bytes_of(parameters)
            known["optimizer"] = bytes_of(_optimizer_states(trainer))
            # An update leaves its gradients until the next `zero_grad`, unless the module frees them itself.
            known["gradients"] = bytes_of(p.grad for p in parameters) or bytes_of(
                p for p in parameters if p.requires_grad
            )
            if "peak_bytes" in self.facts:
                self.facts["peak_bytes"] = sum(known.values())

    def _explanation(self, counter: MemoryCounter) -> dict[str, Any]:
        """What a step takes, what there was for it, which part takes most, and the batch size that would have fitted."""
        available = None if self._free is None else self._free + self._held
        facts: dict[str, Any] = {"available_bytes": available}
        counted = counter.at()
        if counted is not None:
            facts["most"] = max(PARTS, key=counted.parts.__getitem__)
            facts["needed_bytes"] = counted.total
        if counted is not None and available is not None:
            facts["batch_size_that_fits"] = counter.largest_batch_that_fits(USABLE * available)
        return facts


def _optimizer_states(trainer: Trainer) -> list[object]:
    return tree_leaves([state for optimizer in trainer.optimizers for state in optimizer.state.values()])


def _facts_of(counted: StepMemory) -> dict[str, Any]:
    return {
        "batch_size": counted.batch_size,
        "peak_bytes": counted.total,
        "peak_in": counted.stage,
        "parts_bytes": counted.parts,
    }
