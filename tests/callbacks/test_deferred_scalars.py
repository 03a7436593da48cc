"""Numbers on their way from several devices at once."""

import torch

from batchscope.callbacks._deferred_scalars import DeferredScalars


def test_a_scalar_on_the_cpu_beside_the_devices_own_is_read_with_them() -> None:
    scalars = [torch.ones((), device="meta"), torch.tensor([2.0]), torch.tensor(3, dtype=torch.int64)]
    seen: list[tuple[str, int]] = []
    for order in (scalars, scalars[::-1]):
        DeferredScalars(order, lambda values: seen.append((str(values.device), len(values))) or torch.zeros(3))
    assert seen == [("meta", 3)] * 2
