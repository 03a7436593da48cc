"""Loader: copies to a GPU one batch ahead, says what it waited for, and ends its workers."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.data.loader import Loader, TensorBatches
from batchscope.data.order import DeterministicBatchSampler
from batchscope.data.spec import DataSpec
from batchscope.data.workers import raised
from tests.data.support import InMemory
from tests.support.own_data import MapStyle
from tests.support.third_party_modules import Stranger, train

GPU = torch.device("cuda", 0)
LOG: list[Any] = []
CURRENT = ["training"]  # the name of the current stream


class Stream:
    """The part of a CUDA stream that a loader may use; an event is the number of copies until then."""

    def __init__(self, device: object = GPU, name: str = "copying"):
        self.name = name
        LOG.append(("stream", name))

    def record_event(self) -> int:
        return sum(entry[0] == "copy" for entry in LOG)

    def wait_event(self, event: int) -> None:
        LOG.append(("wait", self.name, event))


class FakeTensor(Tensor):
    """A tensor that writes down what is done with it."""

    label: str

    def pin_memory(self, device: object = None) -> "FakeTensor":
        return self

    def to(self, device: object, non_blocking: bool = False) -> "FakeTensor":
        LOG.append(("copy", self.label, *CURRENT, non_blocking))
        return fake_tensor(f"{self.label} on {device}")

    def record_stream(self, stream: Any) -> None:
        LOG.append(("in use by", stream.name, self.label))


def fake_tensor(label: str) -> FakeTensor:
    tensor = torch.empty(0).as_subclass(FakeTensor)
    tensor.label = label
    return tensor


class FakeBatches(Dataset):
    """Batches of two tensors and a text."""

    def __getitems__(self, key: Any) -> Any:
        return {"x": fake_tensor(f"x{key[1][0]}"), "rest": [fake_tensor(f"y{key[1][0]}"), "a"]}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of torch.cuda that a loader may use; of what waits, nothing is there."""

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, CURRENT[:] = [*CURRENT], [chosen.name]
        yield
        CURRENT[:] = before

    LOG.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(name=CURRENT[0]))
    monkeypatch.delattr(torch.cuda, "synchronize")


@contextmanager
def waiting() -> Iterator[None]:
    LOG.append("waiting")
    yield
    LOG.append("waited")


def received(number: int) -> list[Any]:
    """What happens before a batch is handed out: the training stream alone waits for the copies of its two tensors."""
    names = [f"{tensor}{number} on cuda:0" for tensor in "xy"]
    waits = ["waiting", ("wait", "training", 2 * (number + 1)), "waited"]
    return [("stream", "training"), *waits, *(("in use by", "training", name) for name in names), ("train", *names)]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_batch_is_copied_while_the_one_before_is_trained_on(gpu: None, num: int) -> None:
    order = DeterministicBatchSampler(num, 1, shuffle=False)
    batches = Loader(FakeBatches(), order, GPU, 0, waiting, lambda batch: int(batch["x"].label[1:]))
    copies = [[("copy", f"{tensor}{number}", "copying", True) for tensor in "xy"] for number in range(num)]
    copies.append([])  # behind the last
    for epoch in range(2):
        for number, batch in enumerate(batches):
            LOG.append(("train", batch["x"].label, batch["rest"][0].label))
            assert (batch["rest"][1], batches.timesteps) == ("a", number)
        expected = [("stream", "copying")] * (not epoch) + copies[0]  # one stream for all epochs
        for number in range(num):
            expected += copies[number + 1] + received(number)
        assert expected == LOG
        LOG.clear()


def test_the_wait_for_a_copy_is_measured_as_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_copies(served: Loader) -> Iterator[Any]:
        """Waits for every batch's copy as `prefetch_to_device` does; a CPU has no stream to wait in."""
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

    items = raised(broken())
    assert next(items) == 1
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid unknown\) ended while it sent a batch$"):
        next(items)


def test_the_workers_of_a_loader_that_is_garbage_in_a_cycle_end_at_once() -> None:
    data = MapStyle(batch_size=8, num_workers=1)
    data.setup("fit")
    loader = data.train_dataloader()
    next(iter(loader))
    loader.trainer = [loader]  # as a trainer, its loops and its loaders hold each other
    del loader
    begun = time.monotonic()
    gc.collect()
    assert time.monotonic() - begun < 4  # torch waits 5 s for a worker that has not been told


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
