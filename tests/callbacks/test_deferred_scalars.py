"""Numbers on their way from a device: from several devices at once, and read without a wait in the step."""

from collections import deque

import pytest
import torch

from batchscope.callbacks._deferred_scalars import POOL, DeferredFlags, DeferredScalars


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


class Behind(DeferredFlags):
    """The flags of a device that is some steps behind the host."""

    def __init__(self, steps: int):
        super().__init__(torch.device("cpu"))
        self.steps, self.waits = steps, 0
        self.queue: deque[tuple[int, torch.Tensor]] = deque()

    def send(self) -> None:
        at = self._sent % POOL
        self.queue.append((at, self._views[at].clone()))
        self._sent += 1
        self.catch_up(self.steps)

    def wait(self) -> None:
        self.waits += 1
        self.catch_up(0)

    def catch_up(self, behind: int) -> None:
        while len(self.queue) > behind:
            at, flag = self.queue.popleft()
            self._host_views[at].copy_(flag)


@pytest.mark.parametrize(("steps", "waits"), [(3, False), (POOL // 2 - 1, False), (2 * POOL, True)])
def test_no_flag_is_waited_for_unless_the_device_is_hopelessly_behind(steps: int, waits: bool) -> None:
    flags, heard = Behind(steps), []
    for step in range(3 * POOL):
        flags.next().fill_(float(step % 7 == 0))
        flags.send()
        heard += flags.arrived()
    assert bool(flags.waits) is waits
    flags.wait()
    assert heard + flags.arrived() == [step % 7 == 0 for step in range(3 * POOL)]


def test_without_an_asynchronous_copy_flags_arrive_when_they_are_awaited() -> None:
    flags = DeferredFlags(torch.device("cpu"))
    flags._device = torch.device("mps")  # which no machine of the tests has
    heard = []
    for step in range(10):
        flags.next().fill_(float(step % 3 == 0))
        flags.send()
        assert flags.arrived() == []
        if step % 5 == 4:
            flags.wait()
            heard += flags.arrived()
    assert heard == [step % 3 == 0 for step in range(10)]
