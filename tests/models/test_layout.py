"""Weights go to torch's own recurrent modules and come back, and what does not fit is refused whole."""

import pytest
import torch
from torch import nn

from batchscope.models.layout import load_torch_state_dict, torch_state_dict
from batchscope.models.recurrent import LSTMCell, RNNCell, StackedLSTM, unroll

FEATURES, HIDDEN = 3, 5
PAIRS = {
    "RNNCell": (lambda: RNNCell(FEATURES, HIDDEN), lambda: nn.RNN(FEATURES, HIDDEN, batch_first=True)),
    "LSTMCell": (lambda: LSTMCell(FEATURES, HIDDEN), lambda: nn.LSTM(FEATURES, HIDDEN, batch_first=True)),
    "StackedLSTM": (
        lambda: StackedLSTM(3, FEATURES, HIDDEN, dropout=0),
        lambda: nn.LSTM(FEATURES, HIDDEN, 3, batch_first=True),
    ),
}
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)


def output(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (unroll(module, x) if isinstance(module, RNNCell | LSTMCell) else module(x))[0]


@pairs
def test_torchs_module_computes_the_same_with_our_weights(ours, theirs):
    ours, theirs, x = ours(), theirs(), torch.randn(2, 7, FEATURES)
    theirs.load_state_dict(torch_state_dict(ours))
    torch.testing.assert_close(output(theirs, x), output(ours, x))


@pairs
def test_we_compute_the_same_with_the_weights_of_torchs_module(ours, theirs):
    ours, theirs, x = ours(), theirs(), torch.randn(2, 7, FEATURES)
    load_torch_state_dict(ours, theirs.state_dict())
    torch.testing.assert_close(output(ours, x), output(theirs, x))


@pairs
def test_what_is_saved_is_a_copy(ours, theirs):
    ours = ours()
    for tensor in torch_state_dict(ours).values():
        tensor.zero_()
    assert all(parameter.any() for parameter in ours.parameters())


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (nn.LSTM(FEATURES, HIDDEN, 2), "no bias_hh_l2"),
        (nn.LSTM(FEATURES, HIDDEN, 4), "bias_hh_l3, which has no place"),
        (nn.LSTM(FEATURES, HIDDEN, 3, bidirectional=True), "_reverse, which has no place"),
        (nn.LSTM(FEATURES, HIDDEN, 3, bias=False), "no bias_hh_l0"),
        (nn.LSTM(FEATURES, HIDDEN, 3, proj_size=2), "weight_hr_l0, which has no place"),
        (nn.LSTM(FEATURES + 1, HIDDEN, 3), r"weight_ih_l0 of shape \(20, 4\) for \(20, 3\)"),
        (nn.GRU(FEATURES, HIDDEN, 3), r"weight_ih_l0 of shape \(15, 3\) for \(20, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_copied(theirs, why):
    ours = StackedLSTM(3, FEATURES, HIDDEN)
    before = torch_state_dict(ours)
    with pytest.raises(ValueError, match=rf"^state_dict: does not fit a StackedLSTM: .*{why}"):
        load_torch_state_dict(ours, theirs.state_dict())
    torch.testing.assert_close(torch_state_dict(ours), before, rtol=0, atol=0)
