"""Read numbers from a device without waiting for it: start the copy now, and read the numbers once they have arrived."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class DeferredScalars:
    """Scalars on their way to the host.

    On CUDA the copy into pinned memory is queued behind the work that computes the scalars; only `values` waits for it.
    On a CPU there is nothing to wait for. MPS has no asynchronous copy, so the constructor waits for the device.

    `scalars` are tensors of one element each; those on the CPU are copied to the device of the others. On a CPU and on CUDA
    they are read as float64, elsewhere as float32. `combine`, `(N,)` → `(N,)`, runs on that device.
    """

    def __init__(self, scalars: Sequence[Tensor], combine: Callable[[Tensor], Tensor] = lambda values: values):
        stacked = combine(_stack(scalars))
        self._event = None
        self._values = stacked.to("cpu", non_blocking=stacked.is_cuda)
        if stacked.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        """Whether `values` returns at once."""
        return self._event is None or self._event.query()

    def values(self) -> list[float]:
        """Return the numbers in the order of `scalars`; wait for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


@torch.no_grad()
def _stack(scalars: Sequence[Tensor]) -> Tensor:
    device = max((scalar.device for scalar in scalars), key=lambda device: device.type != "cpu")
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32  # MPS has no float64
    scalars = [s if s.device == device else s.to(dtype).to(device, non_blocking=True) for s in scalars]
    if len({(scalar.dtype, scalar.dim()) for scalar in scalars}) == 1:  # one `stack` needs a tenth of the operations
        return torch.stack(scalars).reshape(-1).to(dtype)
    return torch.stack([scalar.reshape(()).to(dtype) for scalar in scalars])
