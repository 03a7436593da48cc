"""The dimensions of an operation, as a recorder sees them in real steps."""

import pytest
import torch
from torch import nn

from batchscope.hardware.dims import dims_of
from batchscope.hardware.operations import OperationRecorder


def recorded(module: nn.Module, *inputs: torch.Tensor) -> dict[str, list[tuple[int, ...]]]:
    """The dimensions of every operation of a forward and a backward pass, by name."""
    recorder = OperationRecorder(module)
    with recorder:
        result = module(*inputs)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
    assert recorder.error is None
    found: dict[str, list[tuple[int, ...]]] = {}
    for operation in recorder.operations():
        found.setdefault(operation.name.removeprefix("aten."), []).append(operation.dims)
    return found


def test_the_dimensions_of_products_convolutions_and_rows():
    found = recorded(nn.Linear(7, 5), torch.randn(3, 7, requires_grad=True))
    assert found["addmm"] == [(3, 5, 7)]
    assert sorted(found["mm"]) == sorted([(3, 7, 5), (5, 7, 3)])  # of the input, and of the weight
    attention = recorded(nn.MultiheadAttention(8, 2, batch_first=True), *[torch.randn(3, 6, 8)] * 3)
    assert (6, 6, 6, 4) in [*attention["bmm"], *attention.get("baddbmm", [])]  # the number of products first
    found = recorded(nn.Conv2d(4, 8, 3, groups=2), torch.randn(2, 4, 10, 12, requires_grad=True))
    assert found["convolution"] == found["convolution_backward"] == [(2, 8, 8, 10, 2, 3, 3)]
    assert recorded(nn.Conv1d(4, 8, 3), torch.randn(2, 4, 10))["convolution"] == [(2, 8, 8, 4, 3)]
    assert recorded(nn.LayerNorm((3, 4)), torch.randn(5, 3, 4))["native_layer_norm"] == [(5, 12)]
    assert recorded(nn.Softmax(dim=1), torch.randn(5, 3, 4, requires_grad=True))["_softmax"] == [(20, 3)]
    assert recorded(nn.ReLU(), torch.randn(5, 3, 4, requires_grad=True))["relu"] == [()]


@pytest.mark.parametrize(
    ("name", "first", "dims"),
    [
        ("mkldnn_rnn_layer", False, (4, 11, 5, 7)),  # torch has swapped them
        ("_cudnn_rnn", True, (11, 4, 5, 7)),
        ("_cudnn_rnn", False, (4, 11, 5, 7)),
    ],
)
def test_a_recurrent_kernel_has_steps_samples_features_and_hidden(name, first, dims):
    inputs = {"input": torch.empty(4, 11, 5), "hidden_size": 7, "batch_first": first}
    assert dims_of(name, inputs, []) == dims


def test_an_operation_that_has_not_what_its_name_says_has_no_dimensions():
    assert dims_of("addmm", {}, []) == dims_of("convolution", {}, []) == ()
