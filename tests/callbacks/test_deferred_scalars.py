"""Numbers on their way from a device: from several devices at once, and read without a wait in the step."""

import pytest
import torch

from batchscope.callbacks._deferred_scalars import DeferredScalars


def test_a_scalar_on_the_cpu_beside_the_devices_own_is_read_with_them() -> None:
    scalars = [torch.ones((), device="meta"), torch.tensor([2.0]), torch.tensor(3, dtype=torch.int64)]
    seen: list[torch.Tensor] = []
    for order in (scalars, scalars[::-1], [scalars[1], torch.ones(1, device="meta")]):
        DeferredScalars(order, lambda values: seen.append(values) or torch.zeros(len(values)))
    assert [(str(values.device), tuple(values.shape)) for values in seen] == [
        ("meta", (3,)),
        ("meta", (3,)),
        ("meta", (2,)),
    ]


def test_without_an_asynchronous_copy_the_numbers_are_on_the_host_when_the_read_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads them later, where no time is measured, would wait for the device there."""
    copied, copy = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where, **how: copied.append(how) or copy(tensor, *where))
    read = DeferredScalars([torch.ones(())])
    assert copied == [{"non_blocking": False}]
    assert read.ready()
