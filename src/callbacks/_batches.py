"""The samples and tensors in a batch of any type, and the loss that it had."""

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


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch, depth first; 0 for a batch without tensors.

    A batch is a tensor, or tuples, lists and dicts of tensors, nested in any way.
    """
    return SampleCounter(None)(batch)


class SampleCounter:
    """Counts the samples of each batch of a loader: the length of its first tensor, or of another tensor or list.

    The first batch is taken to be full. If its first tensor does not have the loader's batch size, the first tensor, or list of
    samples around a tensor, of that length is counted from then on. A `collate_fn` that does not stack, because images
    have different sizes, returns such a list, or a list for each field.
    """

    def __init__(self, loader: Any):
        self._size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)  # None after the first batch
        # The container that is counted: the index of a path to a tensor, and the container's position on it from its end.
        self._path_index, self._depth = 0, -1

    def __call__(self, batch: Any) -> int:
        if self._size is not None:
            self._locate_samples(batch, self._size)
        paths = _tensor_paths(batch)
        path = next(paths, None)
        path = next(islice(paths, self._path_index - 1, None), path) if self._path_index else path
        return _length(path[max(self._depth, -len(path))]) if path else 0

    def _locate_samples(self, batch: Any, size: int) -> None:
        for index, path in enumerate(_tensor_paths(batch)):
            self._size = None
            for depth, container in enumerate(reversed(path), 1):
                if _length(container) == size and _holds_samples(container, is_batch=depth == len(path)):
                    self._path_index, self._depth = index, -depth
                    return


def bytes_in(batch: Any) -> int:
    """Return the bytes of the dense tensors in a batch, which are copied to a device."""
    return sum(tensor.nbytes for tensor in tensors_in(batch) if tensor.layout == torch.strided)


def timesteps_per_sample(module: object) -> int:
    """Return T for a module whose `spec` has the kind `sequence` and the shape `(T, …)`; 0 for any other module.

    Return 0 for sequences of different lengths, too: only the device knows the sum of their lengths.
    """
    spec: Any = getattr(module, "spec", None)
    if has_variable_length(module):
        return 0
    return spec.input_shape[0] if getattr(spec, "kind", None) == "sequence" else 0


def batch_loss(trainer: Trainer, module: LightningModule, loss: Any) -> Any:
    """Return the loss of a batch, given its share of the update, which Lightning passes when it accumulates gradients."""
    batches = trainer.accumulate_grad_batches if module.automatic_optimization else 1
    return loss * batches if isinstance(loss, Tensor) and batches > 1 else loss


def has_variable_length(module: object) -> bool:
    """Whether a module's `spec` is of sequences of different lengths, so that batches differ in work."""
    return bool(getattr(getattr(module, "spec", None), "variable_length", False))


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor in a batch, depth first; None without one."""
    return next(tensors_in(batch), None)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Return all tensors in a batch, depth first."""
    return (path[-1] for path in _tensor_paths(batch))


def _tensor_paths(batch: Any) -> Iterator[list[Any]]:
    """Yield the path to each tensor in a batch, depth first: its containers, outermost first, and the tensor itself."""
    if isinstance(batch, Tensor):
        yield [batch]
    for child in _children(batch):
        for path in _tensor_paths(child):
            yield [batch, *path]


def _length(container: Any) -> int:
    if isinstance(container, Tensor):
        return container.size(0) if container.ndim else 1  # a nested tensor has no `shape`
    return len(container)


def _holds_samples(container: Any, is_batch: bool) -> bool:
    """Whether a container's items may be samples: they have one type. Tensors in the batch itself are its fields."""
    if not isinstance(container, _SEQUENCES):
        return isinstance(container, Tensor)
    return len({*map(type, container)}) == 1 and not (is_batch and isinstance(container[0], Tensor))


def _children(batch: Any) -> Iterable[Any]:
    if isinstance(batch, _SEQUENCES):
        return batch
    return batch.values() if isinstance(batch, Mapping) else ()
