"""Batches: in an order that is a function of (seed, epoch) alone, whatever serves them, on however many processes."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.data import base, order
from batchscope.data.base import MIN_EVAL_BATCH_SIZE, Split
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.loader import Loader, TensorBatches, prefetch_to_device
from batchscope.data.order import DeterministicBatchSampler
from batchscope.data.spec import DataSpec
from batchscope.errors import UserError

NUM = 50


class Numbers(TensorDataModule):
    """Sample i is the numbers 2i and 2i + 1 with the label i, so that a batch says which samples it holds."""

    kind = "sequence"
    name = "numbers"
    spec = DataSpec("sequence", (2, 1), "class", num_outputs=1_000)
    sizes = {"train": NUM, "val": 2 * MIN_EVAL_BATCH_SIZE + 5, "test": 7}

    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        size = self.sizes[split]
        return torch.arange(2.0 * size).view(size, 2, 1), torch.arange(size)


def numbers(**options: Any) -> Numbers:
    data = Numbers(**{"batch_size": 8, **options})
    for stage in ("fit", "test"):
        data.setup(stage)
    return data


def samples(batches: Any) -> list[list[int]]:
    """The samples of each batch, having checked that inputs and labels belong together."""
    found = []
    for x, y in batches:
        assert torch.equal(x[..., 0], torch.stack([2.0 * y, 2.0 * y + 1], dim=1))
        found.append(y.tolist())
    return found


def joined(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def epoch_of(batches: Any, epoch: int) -> list[list[int]]:
    batches.batch_sampler.set_epoch(epoch)
    return samples(batches)


PIPELINES = {
    "memory": {"pipeline": "memory"},
    "device": {"pipeline": "device"},
    "workers in the training process": {"pipeline": "workers", "num_workers": 0},
    "workers": {"pipeline": "workers", "num_workers": 2},
}
pipelines = pytest.mark.parametrize("options", PIPELINES.values(), ids=PIPELINES)

# --- the order -------------------------------------------------------------------------------------------------------


@pipelines
def test_every_sample_comes_once_in_an_epoch_and_the_short_last_batch_is_kept(options: dict[str, Any]) -> None:
    batches = samples(numbers(**options).train_dataloader())
    assert [len(batch) for batch in batches] == [8] * 6 + [2]
    assert sorted(joined(batches)) == list(range(NUM))


@pipelines
def test_training_samples_are_shuffled_differently_in_every_epoch(options: dict[str, Any]) -> None:
    batches = numbers(**options).train_dataloader()
    first, second = epoch_of(batches, 0), epoch_of(batches, 1)
    assert joined(first) != list(range(NUM))
    assert first != second


@pipelines
def test_evaluation_samples_come_in_the_stored_order_in_every_epoch(options: dict[str, Any]) -> None:
    batches = numbers(**options).val_dataloader()
    stored = list(range(Numbers.sizes["val"]))
    assert joined(epoch_of(batches, 0)) == joined(epoch_of(batches, 1)) == stored


def test_all_pipelines_serve_identical_batches() -> None:
    served = [
        [epoch_of(batches, epoch) for epoch in (0, 1, 5)]
        for batches in (numbers(seed=3, **options).train_dataloader() for options in PIPELINES.values())
    ]
    assert all(epochs == served[0] for epochs in served)


@pipelines
def test_the_order_and_the_models_random_numbers_have_nothing_to_do_with_each_other(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    first, before = samples(numbers(**options).train_dataloader()), torch.Generator().manual_seed(1).get_state()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert samples(numbers(**options).train_dataloader()) == first


@pipelines
def test_an_epoch_is_the_same_again_and_after_one_that_was_broken_off(options: dict[str, Any]) -> None:
    batches = numbers(**options).train_dataloader()
    first = epoch_of(batches, 4)
    next(iter(batches))
    epoch_of(batches, 9)
    assert epoch_of(batches, 4) == first


def test_evaluation_takes_batches_that_do_not_leave_the_device_idle() -> None:
    assert [len(y) for _, y in numbers(batch_size=8).val_dataloader()] == [256, 256, 5]
    assert [len(y) for _, y in numbers(batch_size=300).val_dataloader()] == [300, 217]


def asked_by(data: Numbers, **module: Any) -> Numbers:
    """The data in a trainer of a module with some attributes."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(**module), strategy=strategy)
    return data


def test_evaluations_batches_are_bounded_by_the_bytes_of_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_EVAL_BYTES", 100 * 8)  # a sample is two numbers of 4 bytes
    assert numbers(batch_size=8).val_dataloader().batch_sampler.batch_size == 100
    assert numbers(batch_size=150).val_dataloader().batch_sampler.batch_size == 150  # which training holds, too
    monkeypatch.setattr(base, "MAX_EVAL_BYTES", 1)
    assert numbers(batch_size=8).test_dataloader().batch_sampler.batch_size == 8


def test_the_bytes_are_those_of_the_inputs_that_the_network_computes_on() -> None:
    for shape, batch_size in [((1, 28, 28), 256), ((3, 32, 32), 256), ((3, 224, 224), 27), ((3, 4000, 4000), 8)]:
        batches = asked_by(numbers(batch_size=8), input_shape=shape).val_dataloader().batch_sampler
        assert batches.batch_size == batch_size


class Recorder(lightning.LightningModule):
    """Trains one number, and writes down the samples that it was given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.epochs: dict[int, list[list[int]]] = {}

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.epochs.setdefault(self.current_epoch, []).append(batch[1].tolist())
        return self.layer(batch[0].flatten(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pipeline", ["memory", "workers"])
def test_lightning_tells_the_loader_which_epoch_it_is(pipeline: str) -> None:
    recorder = Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, barebones=True, use_distributed_sampler=False, limit_val_batches=0
    )
    trainer.fit(recorder, datamodule=Numbers(batch_size=8, pipeline=pipeline, num_workers=0, seed=6))
    batches = numbers(seed=6).train_dataloader()
    assert recorder.epochs == {epoch: epoch_of(batches, epoch) for epoch in range(3)}


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [PIPELINES["memory"], PIPELINES["workers in the training process"]])
def test_a_process_is_served_its_own_share(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(order, "rank_and_world_size", lambda rank=rank: (rank, 2))
        parts.append(samples(numbers(batch_size=4, **options).train_dataloader()))
    monkeypatch.undo()
    assert [joined(pair) for pair in zip(*parts, strict=True)] == samples(
        numbers(batch_size=8, **options).train_dataloader()
    )


# --- models that cannot be trained on a single sample ----------------------------------------------------------------


@pipelines
def test_a_resumed_epoch_ends_with_the_batch_that_the_rest_has_joined(options: dict[str, Any]) -> None:
    whole, resumed = (asked_by(numbers(batch_size=7, **options), min_samples=2) for _ in range(2))
    resumed.resume_at(2, 5)
    rest = resumed.train_dataloader()
    served = epoch_of(whole.train_dataloader(), 2)
    assert [len(batch) for batch in served] == [7] * 6 + [8]
    assert samples(rest) == served[5:]
    assert len(rest) == len(served)


def test_too_few_samples_for_the_processes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "rank_and_world_size", lambda: (0, 51))
    with pytest.raises(UserError, match=r"^trainer\.devices: 51 processes, and numbers has 50 training samples$"):
        numbers().train_dataloader()


# --- beginning in the middle of an epoch -----------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "done"), [*((each, 3) for each in PIPELINES.values()), ({}, 0), ({}, 7)])
def test_a_resumed_epoch_is_served_without_the_batches_that_were_trained(options: dict[str, Any], done: int) -> None:
    whole, resumed = numbers(**options).train_dataloader(), numbers(**options)
    resumed.resume_at(2, done)
    rest = resumed.train_dataloader()
    whole.batch_sampler.set_epoch(2)
    assert samples(rest) == samples(whole)[done:]
    assert len(rest) == len(whole)
    for each in (whole, rest):
        each.batch_sampler.set_epoch(3)
    assert samples(rest) == samples(whole)


# --- the same batches in every epoch ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [PIPELINES["memory"], PIPELINES["workers in the training process"]])
def test_overfitting_trains_on_the_same_batches_in_every_epoch(options: dict[str, Any]) -> None:
    recorder = Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, overfit_batches=2, logger=False, use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(recorder, datamodule=Numbers(batch_size=8, **options))
    first = epoch_of(numbers().train_dataloader(), 0)[:2]
    assert recorder.epochs == {0: first, 1: first, 2: first}


# --- copying ahead ---------------------------------------------------------------------------------------------------


class FakeGPU:
    """The part of torch.cuda that `prefetch_to_device` may use, writing down what happens; anything that waits is missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.log: list[tuple[Any, ...]] = []
        self.current = "training"
        self.streams = 0
        gpu = self

        class Stream:
            def __init__(self, device: object = None, name: str = "copying"):
                self.name = name
                if name == "copying":
                    gpu.streams += 1

            def record_event(self) -> tuple[str, int]:
                copies = sum(entry[0] == "copy" for entry in gpu.log)
                return (self.name, copies)  # reached when that many copies have been made

            def wait_event(self, event: tuple[str, int]) -> None:
                gpu.log.append(("wait", self.name, event))

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, gpu.current = gpu.current, chosen.name
            yield
            gpu.current = before

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("the host waited for the device")

        for name, fake in {
            "Stream": Stream,
            "stream": stream,
            "current_stream": lambda _=None: Stream(name=gpu.current),
            "synchronize": refuse,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)


class FakeTensor(Tensor):
    """A tensor that writes down what is done with it."""

    gpu: FakeGPU
    label: str
    on_device = False

    def to(self, device: object, non_blocking: bool = False) -> "FakeTensor":
        assert non_blocking
        self.gpu.log.append(("copy", self.label, self.gpu.current))
        sent = fake_tensor(self.gpu, self.label)
        sent.on_device = True
        return sent

    def record_stream(self, stream: Any) -> None:
        assert self.on_device
        self.gpu.log.append(("in use by", stream.name, self.label))


def fake_tensor(gpu: FakeGPU, label: str) -> FakeTensor:
    tensor = torch.empty(0).as_subclass(FakeTensor)
    tensor.gpu, tensor.label = gpu, label
    return tensor


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


def train_on(gpu: FakeGPU, num: int) -> list[list[str]]:
    """Take `num` batches, dicts with two tensors, through `prefetch_to_device`, writing down when each is handed out."""
    batches = ({"x": fake_tensor(gpu, f"x{i}"), "rest": [fake_tensor(gpu, f"y{i}"), "a"]} for i in range(num))
    received = []
    device = torch.device("cuda", 0)
    for index, batch in enumerate(prefetch_to_device(batches, device, torch.cuda.Stream(device))):
        gpu.log.append(("train", index))
        tensors = [batch["x"], batch["rest"][0]]
        assert all(tensor.on_device for tensor in tensors)
        received.append([tensor.label for tensor in tensors])
    return received


@pytest.mark.parametrize("num", [0, 1, 2, 5])
def test_batches_arrive_on_the_gpu_in_order_and_complete(gpu: FakeGPU, num: int) -> None:
    assert train_on(gpu, num) == [[f"x{i}", f"y{i}"] for i in range(num)]


def test_the_next_batch_is_being_copied_before_one_is_handed_out(gpu: FakeGPU) -> None:
    train_on(gpu, 4)
    for index in range(3):
        copied = [gpu.log.index(("copy", f"{tensor}{index + 1}", "copying")) for tensor in "xy"]
        assert max(copied) < gpu.log.index(("train", index))
    assert gpu.log.index(("copy", "x2", "copying")) > gpu.log.index(("train", 0))  # and no more than one ahead


def test_the_training_stream_waits_for_its_own_batch_and_no_later_one(gpu: FakeGPU) -> None:
    train_on(gpu, 4)
    waits = [entry for entry in gpu.log if entry[0] in ("wait", "train")]
    expected = []
    for index in range(4):
        expected += [("wait", "training", ("copying", 2 * (index + 1))), ("train", index)]
    assert waits == expected


def test_the_wait_for_a_copy_is_all_that_lies_in_the_context_of_waiting(gpu: FakeGPU) -> None:
    @contextmanager
    def waiting() -> Iterator[None]:
        gpu.log.append(("waiting", gpu.current))
        yield
        gpu.log.append(("waited", gpu.current))

    batches = [(fake_tensor(gpu, f"x{i}"),) for i in range(3)]
    list(prefetch_to_device(batches, torch.device("cuda", 0), torch.cuda.Stream(), waiting))
    begins = [index for index, entry in enumerate(gpu.log) if entry[0] == "waiting"]
    assert [gpu.log[i : i + 3] for i in begins] == [
        [("waiting", "training"), ("wait", "training", ("copying", copies)), ("waited", "training")]
        for copies in (1, 2, 3)
    ]


def test_a_loader_has_one_stream_for_all_epochs(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBatches, "__getitems__", lambda self, key: [fake_tensor(gpu, "x")])
    order = DeterministicBatchSampler(3, 1, shuffle=False)
    served = Loader(TensorBatches((torch.zeros(3),)), order, torch.device("cuda", 0))
    assert [len(list(served)) for _ in range(3)] == [3, 3, 3]
    assert gpu.streams == 1


@pytest.mark.filterwarnings("ignore")
def test_the_wait_for_a_copy_is_measured_as_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_copies(served: Loader) -> Iterator[Any]:
        """Waits for every batch's copy as `prefetch_to_device` does; a CPU has no stream to wait in."""
        for batch in served._loader:
            with served.wait_context():
                time.sleep(0.02)
            yield batch

    monkeypatch.setattr(Loader, "__iter__", slow_copies)
    monitor = ThroughputMonitor(calibrate=False, verbose=False, flops_per_sample=1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[monitor], use_distributed_sampler=False,
        limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Recorder(), datamodule=Numbers(batch_size=5))
    parts = monitor.summary["parts_ms"]
    assert parts["transfer"] >= 20 > parts["data_wait"]


def test_memory_is_kept_until_the_training_stream_is_done_with_it(gpu: FakeGPU) -> None:
    train_on(gpu, 3)
    for index in range(3):
        for tensor in "xy":
            used = gpu.log.index(("in use by", "training", f"{tensor}{index}"))
            assert used < gpu.log.index(("train", index))


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
