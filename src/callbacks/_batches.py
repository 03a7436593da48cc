"""What a batch of any type holds, and the loss that it had."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor

NO_TENSORS = (
    "no tensor was found in the batch, which is searched through tuples, lists and dicts; batch_size_fn of "
    "ThroughputMonitor (callbacks.throughput.batch_size_fn) says how many samples it has"
)


_SEQUENCES = (tuple, list)


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch, depth first; 0 for a batch without tensors.

    A batch is a tensor, or tuples, lists and dicts of them, nested in any way.
    """
    first = first_tensor(batch)
    if first is None:
        return 0
    return first.shape[0] if first.ndim else 1


def bytes_in(batch: Any) -> int:
    """The bytes of the dense tensors in a batch, of which a copy to a device is made."""
    return sum(tensor.nbytes for tensor in tensors_in(batch) if tensor.layout == torch.strided)


def timesteps_of(module: object) -> int:
    """The time steps of a sample: T of a module with a `spec` of kind `sequence` and shape `(T, …)`; 0 for any other.

    0 for sequences of different lengths, whose sum only the device knows.
    """
    spec: Any = getattr(module, "spec", None)
    if varies(module):
        return 0
    return spec.input_shape[0] if getattr(spec, "kind", None) == "sequence" else 0


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
    for child in _children(batch):
        if (first := first_tensor(child)) is not None:
            return first
    return None


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors in a batch, depth first."""
    if isinstance(batch, Tensor):
        yield batch
    for child in _children(batch):
        yield from tensors_in(child)


def _children(batch: Any) -> Iterable[Any]:
    if isinstance(batch, _SEQUENCES):
        return batch
    return batch.values() if isinstance(batch, Mapping) else ()
