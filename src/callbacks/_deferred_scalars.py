"""Reading numbers from a device without making it wait: start the copy now, read it when it has arrived."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class DeferredScalars:
    """Scalars on their way to the host.

    On CUDA the copy goes to pinned memory behind the work that computes them, and nobody waits for it until `values`
    is called. On CPU there is nothing to wait for. MPS offers no such copy: there `values` waits for the device.

    Args:
        scalars: tensors of one element each, on one device.
        combine: what is done on the device to all of them as one tensor, `(N,)` → `(N,)`.
    """

    def __init__(self, scalars: Sequence[Tensor], combine: Callable[[Tensor], Tensor] = lambda values: values):
        stacked = combine(torch.stack([s.detach().reshape(()).float() for s in scalars]))
        self._event = None
        if stacked.is_cuda:
            stacked = stacked.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self._values = stacked

    def ready(self) -> bool:
        """Whether `values` would return at once."""
        return self._event is None or self._event.query()

    def values(self) -> list[float]:
        """The numbers, in the order given."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
