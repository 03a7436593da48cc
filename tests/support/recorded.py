"""The FLOPs of one real training step, recorded as a fit records them."""

from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size

from batchscope._torch import running_autograd_number
from batchscope.hardware.flops import StepFlops, UncountableError, flops_of
from batchscope.hardware.operations import OperationRecorder


def record_step(module: LightningModule, batch: Any) -> OperationRecorder:
    """Run the module's step and its backward pass under a recorder."""
    recorder = OperationRecorder(module, part=lambda: "forward" if running_autograd_number() is None else "backward")
    with torch.enable_grad(), recorder:
        result: Any = module.training_step(batch, 0)
        if module.automatic_optimization:
            module.backward(result["loss"] if isinstance(result, dict) else result)
    assert recorder.error is None, recorder.error
    return recorder


def count_step(module: LightningModule, batch: Any, batch_size: int | None = None) -> StepFlops:
    """The FLOPs of a sample. Raises UncountableError."""
    recorder = record_step(module, batch)
    if recorder.uncounted:
        raise UncountableError(f"no formula for {recorder.uncounted}")
    return flops_of(recorder.steps[-1], batch_size or extract_batch_size(batch))
