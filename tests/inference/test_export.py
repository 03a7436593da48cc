"""An exported file gives the answers of the network, for batches of any size."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from batchscope.data.spec import DataSpec
from batchscope.inference.export import FORMATS, export
from batchscope.inference.load import DataInfo, Trained
from batchscope.inference.samples import samples_of
from batchscope.models.sequence import LSTMCellModel, RNNCellModel
from tests.support.command_lines import refusal

NEEDS_ONNX = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs batchscope[onnx]")


@pytest.mark.parametrize("form", ["torch_export", pytest.param("onnx", marks=NEEDS_ONNX)])
@pytest.mark.parametrize("fixture", ["trained", "reader"])
def test_the_file_answers_what_the_network_answers(fixture: str, form: str, request, tmp_path: Path) -> None:
    network: Trained = request.getfixturevalue(fixture)
    samples = samples_of(network, 12).named
    path = tmp_path / f"a{FORMATS[form]}"
    assert export(network, form, path, samples) < 1e-5
    assert path.is_file()
    if form == "torch_export":
        loaded = torch.export.load(path).module()
        answer = loaded(**samples) if fixture == "reader" else loaded(*samples.values())  # several by name
        torch.testing.assert_close(answer, network.network(**samples))


@pytest.mark.parametrize("form", ["torch_export", pytest.param("onnx", marks=NEEDS_ONNX)])
def test_a_recurrent_network_is_written_with_the_lengths_of_its_sequences(form: str, trained, tmp_path: Path) -> None:
    spec = DataSpec("sequence", (9, 2), "class", 3, variable_length=True)
    samples = {"x": torch.randn(7, 9, 2), "lengths": torch.arange(3, 10)}
    network = replace(trained, network=LSTMCellModel(spec, hidden_size=4))
    assert export(network, form, tmp_path / f"a{FORMATS[form]}", samples) < 1e-5


@pytest.mark.parametrize("model", [RNNCellModel, LSTMCellModel])
def test_the_file_of_a_recurrent_network_answers_with_and_without_gradients(model, trained, tmp_path: Path) -> None:
    network = model(DataSpec("sequence", (9, 2), "class", 3), hidden_size=4)
    x = torch.randn(7, 9, 2)
    export(replace(trained, network=network), "torch_export", tmp_path / "a.pt2", {"x": x})
    loaded = torch.export.load(tmp_path / "a.pt2").module()
    for is_on in (False, True):
        with torch.set_grad_enabled(is_on):
            torch.testing.assert_close(loaded(x), network(x))


@pytest.mark.parametrize(
    ("form", "name", "reason"),
    [
        ("keras", "a.pt2", "format: got 'keras', takes torch_export, onnx"),
        ("torch_export", "a.onnx", "output: got '{}', takes a name that ends in .pt2 for format=torch_export"),
        ("torch_export", "there.pt2", "output: '{}' exists; give another name"),
        ("torch_export", "there.pt2/a.pt2", "output: '{}' cannot be written: "),
    ],
)
def test_what_cannot_be_written_is_refused(trained: Trained, tmp_path: Path, form: str, name: str, reason: str) -> None:
    (tmp_path / "there.pt2").touch()
    assert refusal(export, trained, form, tmp_path / name, samples_of(trained, 4).named).startswith(
        reason.format(tmp_path / name)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["there.pt2"]


class _Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class _NoNumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nan


class _Difference(nn.Module):
    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return x - mask


@pytest.mark.parametrize("network", [_Branches(), _NoNumber()])
def test_a_network_that_no_file_answers_for_leaves_nothing(trained, tmp_path, network) -> None:
    untraceable, samples = replace(trained, network=network), samples_of(trained, 4).named
    message = f"export: {type(network).__name__} cannot be written as torch_export: "
    assert refusal(export, untraceable, "torch_export", tmp_path / "a.pt2", samples).startswith(message)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_comparison_leaves_nothing(trained: Trained, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("batchscope.inference.export._max_difference", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export(trained, "torch_export", tmp_path / "a.pt2", samples_of(trained, 4).named)
    assert not list(tmp_path.iterdir())


def test_an_input_called_x_beside_others_has_no_place(reader: Trained, tmp_path: Path) -> None:
    spec = DataSpec("tensor", (3,), "vector", 3, fields=("x", "mask", "y"))
    model, samples = replace(reader, network=_Difference(), data_info=DataInfo(spec, "own")), {"x": torch.ones(9, 3)}
    export(model, "torch_export", tmp_path / "other.pt2", samples | {"mask": torch.zeros(9, 3)})
    answer = torch.export.load(tmp_path / "other.pt2").module()(x=torch.ones(2, 3), mask=torch.zeros(2, 3))
    assert answer.tolist() == [[1.0] * 3] * 2
