"""Latency by batch size: a row for each size, and a recommendation by the rules of sweeps."""

import contextlib
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from batchscope.data.spec import DataSpec
from batchscope.hardware.devices import as_current_device
from batchscope.hardware.processor import Noise
from batchscope.inference import latency
from batchscope.inference.latency import measure_latency
from batchscope.inference.load import DataInfo, Trained
from batchscope.sweep.passes import Limits
from tests.support.command_lines import answer, refusal


@pytest.mark.parametrize("fixture", ["trained", "reader"])
def test_each_size_has_its_latency_and_its_rate(fixture: str, request, limits: Limits) -> None:
    latencies = measure_latency(request.getfixturevalue(fixture), [40, 1], limits)  # the reader has 12 samples
    table = latencies.table.set_index("batch size")
    assert list(table.index) == [1, 40]
    assert (table["p50 ms"] > 0).all()
    assert (table["p50 ms"] * table["samples/s"] / table.index).between(100, 10_000).all()  # about 1,000 ms/s
    assert table["of best"].max() == 1
    assert latencies.precision == "32-true"
    assert latencies.sentences()
    assert latencies.lines()[0].split()[:4] == ["batch", "size", "p50", "ms"]


def test_the_gpu_that_is_measured_is_the_one_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    for name in ("cpu", "cuda:3"):
        with as_current_device(torch.device(name)):
            pass
    assert entered == [torch.device("cuda:3")]


@pytest.mark.parametrize(
    ("device", "noise", "others_share"),
    [
        ("cpu", Noise(0.2, 0.5), 0.2),
        ("cuda", Noise(0.2, 0.5), 0.0),  # the host of an accelerator has free cores
        ("cuda", Noise(0.9, 0.05), 0.9),
        ("cpu", Noise(), 0.0),
        ("cuda", Noise(), 0.0),
    ],
)
def test_what_other_programs_take_counts_where_it_can_slow_the_device(device, noise, others_share, monkeypatch) -> None:
    monkeypatch.setattr(latency, "NoiseMeter", lambda: SimpleNamespace(read=lambda: noise))
    size = latency._SizeRun(2, torch.nn.Identity(), lambda: ((torch.ones(2),), {}), None, device)
    assert size.visit(0, 0.0)["others_share"] == others_share


def test_the_device_of_a_model_is_the_one_that_was_typed() -> None:
    errors = answer("latency", "model=mlp", "data=digits", "trainer.accelerator=mps").err
    assert errors.startswith("error: trainer.accelerator: got 'mps', and this machine has ")


class _OutOfMemory(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


def test_a_size_that_does_not_fit_is_named(trained: Trained, limits: Limits) -> None:
    small = replace(trained, network=_OutOfMemory())
    latencies = measure_latency(small, [1, 8], limits)
    assert latencies.table["p50 ms"].isna().tolist() == [False, True]
    assert latencies.sentences()[-1] == "Out of memory: 8."
    assert refusal(measure_latency, small, [8, 16]) == "data.batch_size: no batch of 8, 16 fits into memory"


def test_the_only_size_is_compared_with_no_other(trained: Trained, limits: Limits) -> None:
    (sentence,) = measure_latency(trained, [4], limits).sentences()
    assert re.fullmatch(r"4 answers \S+ samples/s at \S+ ms a batch\.", sentence)


class _Words(torch.nn.Module):
    """A network that reads token numbers, and no lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x).mean(1)


def test_random_inputs_of_a_network_that_reads_tokens_are_tokens(trained: Trained, limits: Limits) -> None:
    spec = DataSpec("sequence", (9,), "class", 3, variable_length=True)
    reader = replace(trained, network=_Words(), data_info=DataInfo(spec, "own"), dtype=None)
    assert (measure_latency(reader, [1, 40], limits).table["p50 ms"] > 0).all()


def test_inputs_of_a_network_that_was_trained_on_whole_numbers_are_some(trained: Trained, limits: Limits) -> None:
    info = DataInfo(DataSpec("tensor", (12,), "class", 3), "own")
    reader = replace(trained, network=_Words(), data_info=info, dtype=torch.int64)
    assert (measure_latency(reader, [1, 40], limits).table["p50 ms"] > 0).all()


@pytest.mark.parametrize("option", [False, True])
def test_images_are_stored_as_the_option_says(option: bool, trained: Trained, limits: Limits) -> None:
    network, layouts = torch.nn.Conv2d(3, 4, 3), set()
    last = {"memory_format": torch.channels_last}
    network.register_forward_pre_hook(
        lambda module, arguments: layouts.update(tensor.is_contiguous(**last) for tensor in (*arguments, module.weight))
    )
    info = DataInfo(DataSpec("image", (3, 8, 8), "class", 10), "own")
    trained.module.channels_last = option
    measure_latency(replace(trained, network=network, data_info=info), [1, 40], limits)
    assert layouts == {option}


@pytest.mark.parametrize("network", [torch.nn.Linear(3, 3), torch.nn.Bilinear(3, 3, 3)])  # another shape; two inputs
def test_a_network_of_other_inputs_is_refused(network: torch.nn.Module, trained: Trained) -> None:
    message = f"model: {type(network).__name__} does not take (2, 1, 28, 28): "
    assert refusal(measure_latency, replace(trained, network=network), [2]).startswith(message)
