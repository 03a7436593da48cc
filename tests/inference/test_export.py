"""An exported network answers what the network answers, for batches of any size."""

import importlib.util
from pathlib import Path

import pytest
import torch

from batchscope.errors import UserError
from batchscope.inference.export import FORMATS, export
from batchscope.inference.load import Trained
from batchscope.inference.predict import samples_of

NEEDS_ONNX = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs batchscope[onnx]")


@pytest.mark.parametrize("form", ["torch_export", pytest.param("onnx", marks=NEEDS_ONNX)])
def test_the_file_differs_from_the_network_by_less_than_1e_5(trained: Trained, tmp_path: Path, form: str) -> None:
    done = export(trained, form, tmp_path / f"cnn{FORMATS[form]}", samples_of(trained, 20).named)
    assert done.path.is_file()
    assert done.samples == 20
    assert done.difference is not None
    assert done.difference < 1e-5


def test_weights_alone_are_a_state_dict(trained: Trained, tmp_path: Path) -> None:
    done = export(trained, "state_dict", tmp_path / "cnn.pt", {})
    weights = torch.load(done.path, weights_only=True)
    assert weights.keys() == trained.network.state_dict().keys()


@pytest.mark.parametrize(
    ("form", "name", "why"),
    [
        ("keras", "a.pt2", "format: got 'keras', takes torch_export, onnx, state_dict"),
        ("torch_export", "a.onnx", "takes a name that ends in .pt2"),
        ("state_dict", "there.pt", "exists; give another name"),
    ],
)
def test_what_cannot_be_written_is_refused(trained: Trained, tmp_path: Path, form: str, name: str, why: str) -> None:
    (tmp_path / "there.pt").touch()
    with pytest.raises(UserError, match=why):
        export(trained, form, tmp_path / name, {})
    assert [path.name for path in tmp_path.iterdir()] == ["there.pt"]


class _Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class _NoNumber(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.nan


@pytest.mark.parametrize("network", [_Branches(), _NoNumber()])
def test_a_network_that_no_file_answers_for_leaves_nothing(
    trained: Trained, tmp_path: Path, network: torch.nn.Module
) -> None:
    other = Trained(trained.module, network, trained.data, "other", trained.config)
    with pytest.raises(UserError, match=f"{type(network).__name__} cannot be written as torch_export"):
        export(other, "torch_export", tmp_path / "a.pt2", samples_of(trained, 4).named)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_one_line(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output: '.*cnn.pt' cannot be written: "):
        export(trained, "state_dict", tmp_path / "file" / "cnn.pt", {})
