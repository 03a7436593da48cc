"""Numbers on their way from a device: from several devices at once, and read without a wait in the step."""

import torch

from batchscope.callbacks._deferred_scalars import DeferredScalars


def test_a_scalar_on_the_cpu_beside_the_devices_own_is_read_with_them() -> None:
    scalars = [torch.ones((), device="meta"), torch.tensor([2.0]), torch.tensor(3, dtype=torch.int64)]
    seen: list[torch.Tensor] = []
    for order in (scalars, scalars[::-1], [scalars[1], torch.ones(1, device="meta")]):
        DeferredScalars(order, lambda values: seen.append(values) or values)
    assert [(str(values.device), tuple(values.shape)) for values in seen] == [("meta", (3,)), ("meta", (3,)), ("meta", (2,))]
