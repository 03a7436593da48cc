"""Loader: copies to a GPU one batch ahead, says what it waited for, and ends its workers."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.data.loader import Loader, SampleBatches, TensorBatches
from batchscope.data.order import DeterministicBatchSampler
from batchscope.data.spec import DataSpec
from batchscope.data.workers import raise_user_errors
from tests.data.support import InMemory, loaded
from tests.support.marks import LINUX
from tests.support.own_data import MapStyle
from tests.support.third_party_modules import Stranger, train

LOG: list[Any] = []
CURRENT = ["training"]  # the name of the current stream


class Stream:
    """The part of a CUDA stream that a loader may use; an event is the number of copies until then."""

    def __init__(self, device: object, name: str = "copying"):
        self.name = name
        LOG.append(("stream", name))

    def record_event(self) -> int:
        return sum(entry[0] == "copy" for entry in LOG)

    def wait_event(self, event: int) -> None:
        LOG.append(("wait", self.name, event))


class Batches(Dataset):
    """Batches of two tensors, n and 10 + n, and a text."""

    def __getitems__(self, key: Any) -> Any:
        return {"x": torch.tensor(key[1][0]), "rest": [torch.tensor(10 + key[1][0]), "a"]}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The part of a GPU that a loader may use; a copy adds 100. Calls that wait for the device are missing."""

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, CURRENT[:] = [*CURRENT], [chosen.name]
        yield
        CURRENT[:] = before

    def copied(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        LOG.append(("copy", tensor.item(), device.type, *CURRENT, non_blocking))
        return tensor + 100

    LOG.clear()
    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, device=None: tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda used, by: LOG.append(("in use by", by.name, used.item())))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(device, CURRENT[0]))
    monkeypatch.delattr(torch.cuda, "synchronize")
    return torch.device("cuda", 0)


@contextmanager
def waiting() -> Iterator[None]:
    LOG.append("waiting")
    yield
    LOG.append("waited")


@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_batch_is_copied_while_the_one_before_is_trained_on(gpu: torch.device, num: int) -> None:
    order = DeterministicBatchSampler(num, 1, shuffle=False)
    batches = Loader(Batches(), order, gpu, 0, waiting, lambda batch: batch["x"].item())
    copies = [[("copy", tensor, "cuda", "copying", True) for tensor in (number, 10 + number)] for number in range(num)]
    copies.append([])  # behind the last
    for epoch in range(2):
        for batch in batches:
            x, (y, text) = batch.values()
            LOG.append(("train", x.item(), y.item(), text, batches.timesteps))
        expected = [("stream", "copying")] * (not epoch) + copies[0]  # one stream for all epochs
        for number in range(num):
            x, y = 100 + number, 110 + number
            # before a batch is handed out, the training stream alone waits for the copies of its two tensors
            waits = ["waiting", ("wait", "training", 2 * (number + 1)), "waited"]
            used = [("in use by", "training", x), ("in use by", "training", y)]
            expected += [*copies[number + 1], ("stream", "training"), *waits, *used, ("train", x, y, "a", number)]
        assert expected == LOG
        LOG.clear()


class Placed(Dataset):
    """Batches of a tensor on the CPU, and one that lies on another device."""

    def __getitems__(self, key: Any) -> Any:
        return [torch.zeros(2), torch.zeros(2, device="meta")]


def test_what_lies_on_a_device_already_is_not_pinned(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[str] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, device=None: pinned.append(tensor.device.type) or tensor)
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, non_blocking: tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    list(Loader(Placed(), DeterministicBatchSampler(2, 1, shuffle=False), gpu))
    assert pinned == ["cpu", "cpu"]


def test_the_wait_for_a_copy_is_measured_as_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_copies(served: Loader) -> Iterator[Any]:
        """A loader that waits for the copy of every batch as on a GPU; a CPU has no stream to wait in."""
        for batch in served._loader:
            with served.wait_context():
                time.sleep(0.02)
            yield batch

    monkeypatch.setattr(Loader, "__iter__", slow_copies)
    monitor = ThroughputMonitor(calibrate=False, verbose=False, flops_per_sample=1)
    data = InMemory((torch.zeros(40, 4), torch.zeros(40, 1)), DataSpec("tensor", (4,), "vector", 1), batch_size=4)
    train(Stranger(), monitor, data=data, max_epochs=1)
    parts = monitor.summary["parts_ms"]
    assert parts["transfer"] >= 20 > parts["data_wait"]


def test_a_worker_that_is_killed_while_it_sends_a_batch_is_said_as_any_other() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ConnectionResetError("Connection reset by peer")

    items = raise_user_errors(broken())
    assert next(items) == 1
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid unknown\) ended while it sent a batch$"):
        next(items)


@LINUX
def test_what_refuses_a_worker_shared_memory_is_raised_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
        )

    monkeypatch.setattr(Tensor, "share_memory_", refuse)  # the worker is a fork
    with pytest.raises(RuntimeError, match="unable to allocate shared memory"):
        next(iter(loaded(MapStyle(batch_size=8, num_workers=1)).train_dataloader()))


def test_the_workers_of_a_loader_that_is_garbage_in_a_cycle_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60)  # torch waits so long if not told
    loader = loaded(MapStyle(batch_size=8, num_workers=1)).train_dataloader()
    next(iter(loader))
    loader.trainer = [loader]  # a reference cycle, as of a trainer, its loops and its loaders
    del loader
    begun = time.monotonic()
    gc.collect()
    assert time.monotonic() - begun < 40  # a spawned worker takes seconds to end


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_gets_the_same_batches_while_it_is_busy_with_the_last() -> None:
    device = torch.device("cuda", 0)
    tensors = (torch.randn(4_096, 512), torch.arange(4_096))
    batches = DeterministicBatchSampler(4_096, 64, shuffle=True)
    expected = list(Loader(TensorBatches(tensors), batches, torch.device("cpu")))
    busy = torch.randn(2_048, 2_048, device=device)
    received = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in Loader(TensorBatches(tensors), batches, device):
            busy = (busy @ busy).tanh()
            received.append((x + 0, y + 0))  # read by the training stream, behind its other work
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (x, y), (expected_x, expected_y) in zip(received, expected, strict=True):
        assert torch.equal(x.cpu(), expected_x)
        assert torch.equal(y.cpu(), expected_y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_samples_in_the_memory_of_a_real_gpu_are_served_to_it() -> None:
    x = torch.randn(8, 4, device="cuda")
    samples = SampleBatches(TensorDataset(x, x), DataSpec("tensor", (4,), "vector", 4), "own")
    batches = Loader(samples, DeterministicBatchSampler(8, 4, shuffle=False), x.device)
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), x)
