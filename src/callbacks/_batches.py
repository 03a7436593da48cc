"""What a batch of any type holds, and the loss that it had."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
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
    return SampleCounter(None)(batch)


class SampleCounter:
    """Counts the samples of each batch of a loader: the length of the first tensor, unless the loader makes batches of another one.

    The first batch is full. If the first tensor has not the length of the loader's batches, the first one that has, or a list of
    samples around a tensor, says from then on how many there are. A `collate_fn` that stacks nothing, because images
    have different sizes, leaves such a list, or one of each field.
    """

    def __init__(self, loader: Any):
        self._size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)  # None after the first batch
        # What has the length: the number of a tensor, and a place on the way to it from its end.
        self._tensor, self._place = 0, -1

    def __call__(self, batch: Any) -> int:
        if self._size is not None:
            self._settle(batch, self._size)
        ways = _ways(batch)
        way = next(ways, None)
        way = next(islice(ways, self._tensor - 1, None), way) if self._tensor else way
        return _length(way[max(self._place, -len(way))]) if way else 0

    def _settle(self, batch: Any, size: int) -> None:
        for number, way in enumerate(_ways(batch)):
            self._size = None
            for place, each in enumerate(reversed(way), 1):
                if _length(each) == size and _holds_samples(each, is_batch=place == len(way)):
                    self._tensor, self._place = number, -place
                    return


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
    return next(tensors_in(batch), None)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors in a batch, depth first."""
    return (way[-1] for way in _ways(batch))


def _ways(batch: Any) -> Iterator[list[Any]]:
    """For each tensor in a batch, depth first, what holds it, outermost first, and the tensor."""
    if isinstance(batch, Tensor):
        yield [batch]
    for child in _children(batch):
        for way in _ways(child):
            yield [batch, *way]


def _length(each: Any) -> int:
    if isinstance(each, Tensor):
        return each.size(0) if each.ndim else 1  # a nested tensor has no `shape`
    return len(each)


def _holds_samples(each: Any, is_batch: bool) -> bool:
    """Whether items may be samples: they are of one type. Tensors in the batch itself are its fields."""
    if not isinstance(each, _SEQUENCES):
        return isinstance(each, Tensor)
    return len({*map(type, each)}) == 1 and not (is_batch and isinstance(each[0], Tensor))


def _children(batch: Any) -> Iterable[Any]:
    if isinstance(batch, _SEQUENCES):
        return batch
    return batch.values() if isinstance(batch, Mapping) else ()
