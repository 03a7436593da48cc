"""Read numbers from a device without making it wait: start the copy now, read the numbers when they have arrived.

`DeferredScalars` reads many numbers once in a while. `DeferredFlags` reads one number at every step, where an event, a
pinned allocation and a `stack` for each would cost more than the check that sets the flag.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

POOL = 1024  # flags, in two halves: one is cleared while the other is on its way from the device
_HALF = POOL // 2
_UNKNOWN = -1.0


class DeferredScalars:
    """Scalars on their way to the host.

    CUDA: the copy into pinned memory is queued behind the work that computes the scalars; only `values` waits for it.
    CPU: there is nothing to wait for. MPS has no asynchronous copy, so the constructor waits for the device.

    `scalars` are tensors of one element each. Those on the CPU are copied to the device of the others. `combine`, `(N,)` →
    `(N,)`, runs on that device.
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
        """The numbers, in the order given."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


@torch.no_grad()
def _stack(scalars: Sequence[Tensor]) -> Tensor:
    devices = {scalar.device for scalar in scalars}
    if len(devices) > 1:
        device = max(devices, key=lambda each: each.type != "cpu")
        scalars = [scalar.to(device, non_blocking=True) for scalar in scalars]
    if len({(scalar.dtype, scalar.dim()) for scalar in scalars}) == 1:  # a tenth of the operations
        return torch.stack(list(scalars)).reshape(-1).float()
    return torch.stack([scalar.reshape(()).float() for scalar in scalars])


class DeferredFlags:
    """One flag a step, set on the device, which the host reads once its copy has arrived.

    CPU: it has arrived when it was sent. CUDA: it is copied into pinned memory, behind the work that sets it. MPS has no
    asynchronous copy: it arrives when `wait` was called.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._flags = torch.zeros(POOL, device=device)
        self._host = torch.full((POOL,), _UNKNOWN, pin_memory=device.type == "cuda")
        self._views = list(self._flags.unbind())
        self._host_views = list(self._host.unbind())
        self._read = self._host.numpy()  # the same memory
        self._sent = self._seen = 0

    def next(self) -> Tensor:
        """The flag of the next step; it is 0."""
        at = self._sent % POOL
        if self._sent >= POOL and at % _HALF == 0:
            if self._sent - self._seen > _HALF:
                raise RuntimeError("arrived() was not called")
            self._flags[at : at + _HALF].zero_()
            self._read[at : at + _HALF].fill(_UNKNOWN)
        return self._views[at]

    def send(self) -> None:
        """Start the copy of the flag to the host."""
        at = self._sent % POOL
        if self._device.type != "mps":
            self._host_views[at].copy_(self._views[at], non_blocking=True)
        self._sent += 1

    def wait(self) -> None:
        """Wait until all copies have arrived; only for moments at which training waits for the device anyway."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            flags = self._flags.tolist()
            for number in range(self._seen, self._sent):
                self._read[number % POOL] = flags[number % POOL]

    def arrived(self) -> list[bool]:
        """The flags that have arrived since the last call, in order. A device that is half a pool behind is waited for."""
        if self._sent - self._seen > _HALF:
            self.wait()
        flags = []
        while self._seen < self._sent and (flag := self._read[self._seen % POOL]) != _UNKNOWN:
            flags.append(bool(flag))
            self._seen += 1
        return flags
