"""Numbers on their way from a device: from several devices at once, and read without a wait in the step."""

from collections import deque

import pytest
import torch

from batchscope.callbacks._deferred_scalars import POOL, DeferredFlags, DeferredScalars


def test_a_scalar_on_the_cpu_beside_the_devices_own_is_read_with_them() -> None:
    scalars = [torch.ones((), device="meta"), torch.tensor([2.0]), torch.tensor(3, dtype=torch.int64)]
    seen: list[tuple[str, int]] = []
    for order in (scalars, scalars[::-1]):
        DeferredScalars(order, lambda values: seen.append((str(values.device), len(values))) or torch.zeros(3))
    assert seen == [("meta", 3)] * 2


class Behind(DeferredFlags):
    """The flags of a device that is some steps behind the host; on MPS it is so until somebody waits."""

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
def test_no_flag_is_lost_or_waited_for_unless_the_device_is_hopelessly_behind(steps: int, waits: bool) -> None:
    flags, heard = Behind(steps), []
    for step in range(3 * POOL):
        flags.next().fill_(float(step % 7 == 0))
        flags.send()
        heard += flags.arrived()
    assert bool(flags.waits) is waits
    flags.wait()
    assert heard + flags.arrived() == [step % 7 == 0 for step in range(3 * POOL)]
