"""What a batch of any type holds, and the loss that it had."""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from lightning import LightningModule, Trainer
from torch import Tensor

from ..errors import UserError

NO_TENSORS = (
    "the batch has no tensors; batch_size_fn of ThroughputMonitor (callbacks.throughput.batch_size_fn) says how many "
    "samples it has"
)


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch, depth first; 0 for a batch without tensors.

    A batch is whatever Lightning takes: tensors, and tuples, lists, dicts and dataclasses of them, nested in any way.
    """
    first = first_tensor(batch)
    if first is None:
        return 0
    return first.shape[0] if first.dim() else 1


def require_number(name: str, count: object) -> None:
    """Refuse what a user's function has counted where it is no number: a tensor's may still be on its device.

    Raises:
        UserError: with the name of the function's option.
    """
    if not isinstance(count, numbers.Real):
        raise UserError(
            f"{name}: returned a {type(count).__name__}, takes a function that returns a number of what the host knows: "
            "reading a tensor of a GPU would wait for it"
        )


def timesteps_in(module: object, samples: int) -> int:
    """The time steps of all samples: of a module with a `spec` of kind `sequence` and shape `(T, …)`, T a sample.

    0 for sequences of different lengths, whose sum only the device knows.
    """
    spec: Any = getattr(module, "spec", None)
    if varies(module):
        return 0
    return samples * spec.input_shape[0] if getattr(spec, "kind", None) == "sequence" else 0


def own_loss(trainer: Trainer, module: LightningModule, loss: Any) -> Any:
    """The loss that a training step has returned: Lightning hands callbacks its share of an update of several batches."""
    batches = trainer.accumulate_grad_batches if module.automatic_optimization else 1
    return loss * batches if isinstance(loss, Tensor) and batches > 1 else loss


def varies(module: object) -> bool:
    """Whether a module has a `spec` of sequences of different lengths: one batch says nothing about the next one."""
    return bool(getattr(getattr(module, "spec", None), "variable_length", False))


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor in a batch, depth first."""
    if isinstance(batch, Tensor):
        return batch
    children: Iterable[Any]
    if isinstance(batch, tuple | list):
        children = batch
    elif isinstance(batch, Mapping):
        children = batch.values()
    elif dataclasses.is_dataclass(batch):
        children = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:  # PyG's graphs keep their tensors as attributes
        children = [getattr(batch, "x", None)] if hasattr(batch, "x") else []
    for child in children:
        if (found := first_tensor(child)) is not None:
            return found
    return None
