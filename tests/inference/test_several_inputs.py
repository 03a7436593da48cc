"""A network of several inputs is asked, exported and timed, as one of one input is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import seed_everything

from batchscope.data.spec import DataSpec
from batchscope.errors import UserError
from batchscope.inference.export import FORMATS, export
from batchscope.inference.inputs import read_inputs
from batchscope.inference.latency import measure_latency
from batchscope.inference.load import KnownData, Trained, untrained
from batchscope.inference.predict import predict, samples_of, write_predictions
from batchscope.options.compose import check_command_line
from batchscope.options.groups import use_config_dir
from batchscope.sweep import passes
from batchscope.sweep.passes import Limits
from tests.inference.test_export import NEEDS_ONNX
from tests.support.own_data import write_config


@pytest.fixture
def reader(tmp_path: Path) -> Trained:
    """A model of token numbers and a mask, with its initial weights."""
    seed_everything(0, verbose=False)
    use_config_dir(str(write_config(tmp_path / "configs", "Tokens")))
    words = ["data=own", "model=masked_mean", "trainer.accelerator=cpu", "data.num_workers=0"]
    try:
        return untrained(check_command_line(words, multirun=False)[0])
    finally:
        use_config_dir(None)


def arrays_of(reader: Trained) -> dict[str, Any]:
    """The test samples as arrays of the longest length."""
    named = samples_of(reader, 12).named
    return {name: tensor.numpy() for name, tensor in named.items()}


def test_arrays_have_the_same_answers_as_the_split(reader: Trained, tmp_path: Path) -> None:
    expected = predict(reader, "test")
    np.savez(tmp_path / "samples.npz", **arrays_of(reader))
    found = predict(reader, str(tmp_path / "samples.npz"))
    torch.testing.assert_close(found.output, expected.output)
    assert [file.suffix for file in write_predictions(found, tmp_path / "answers.csv")] == [".csv"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention_mask": None}, "has no array attention_mask, but 'input_ids'"),
        ({"attention_mask": np.ones((3, 9))}, "attention_mask in '{}' has 3 samples, and input_ids 12"),
        ({"attention_mask": np.array(["a"] * 12)}, "attention_mask in '{}' has values of type <U1, takes numbers"),
        ({"input_ids": np.ones((12, 10), int)}, "input_ids in '{}' has the shape (12, 10), takes (N, 9)"),
    ],
)
def test_arrays_that_the_network_does_not_read_are_refused(
    reader: Trained, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    file = tmp_path / "samples.npz"
    np.savez(file, **{name: x for name, x in {**arrays_of(reader), **changes}.items() if x is not None})
    with pytest.raises(UserError) as caught:
        read_inputs(file, reader.spec)
    assert why.format(file) in str(caught.value)
    assert "takes an .npz file with the arrays input_ids, attention_mask" in refusal_of_a_folder(tmp_path, reader)


def refusal_of_a_folder(folder: Path, reader: Trained) -> str:
    with pytest.raises(UserError) as caught:
        read_inputs(folder, reader.spec)
    return str(caught.value)


@pytest.mark.parametrize("form", ["torch_export", pytest.param("onnx", marks=NEEDS_ONNX)])
def test_the_file_takes_the_inputs_by_their_names(reader: Trained, tmp_path: Path, form: str) -> None:
    samples = samples_of(reader, 12).named
    done = export(reader, form, tmp_path / f"reader{FORMATS[form]}", samples)
    assert done.difference is not None
    assert done.difference < 1e-5
    if form == "torch_export":
        loaded = torch.export.load(done.path).module()
        torch.testing.assert_close(loaded(**samples), reader.network(**samples))


class _Difference(torch.nn.Module):
    def forward(self, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x - mask


def test_an_input_called_x_beside_others_has_no_place(reader: Trained, tmp_path: Path) -> None:
    spec = DataSpec("tensor", (3,), "vector", 3, fields=("x", "mask", "y"))
    other = Trained(reader.module, _Difference(), KnownData(spec, "own"), "other", reader.config)
    done = export(other, "torch_export", tmp_path / "other.pt2", {"x": torch.ones(9, 3), "mask": torch.zeros(9, 3)})
    found = torch.export.load(done.path).module()(x=torch.ones(2, 3), mask=torch.zeros(2, 3))
    assert found.tolist() == [[1.0] * 3] * 2


def test_its_latency_is_measured_with_test_samples(reader: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "VISIT_S", 0.002)
    found = measure_latency(reader, [1, 40], Limits(seconds=0.05, decide_s=0.1))  # there are 12
    assert (found.table["p50_ms"] > 0).all()
