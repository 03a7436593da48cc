"""Weights to and from torch's own recurrent modules: the same numbers under the names of nn.LSTM, nn.RNN and their
cells."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .recurrent import LSTMCell, RNNCell, StackedLSTM


def torch_state_dict(module: RNNCell | LSTMCell | StackedLSTM) -> dict[str, Tensor]:
    """A state_dict for `nn.LSTM` (of an LSTMCell or a StackedLSTM) or `nn.RNN` (of an RNNCell).

        theirs = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        theirs.load_state_dict(torch_state_dict(ours))

    The tensors are copies: `weight_ih_l0: (4H, F)`, `weight_hh_l0: (4H, H)`, `bias_ih_l0` and `bias_hh_l0: (4H,)`, and
    so on for every layer; H instead of 4H of an RNNCell.
    """
    return {name: parameter.detach().clone() for name, parameter in _named(module).items()}


def load_torch_state_dict(module: RNNCell | LSTMCell | StackedLSTM, state_dict: Mapping[str, Tensor]) -> None:
    """Copy the weights of an `nn.LSTM` or `nn.RNN` with tanh into an LSTMCell, StackedLSTM or RNNCell of that size.

        load_torch_state_dict(ours, nn.LSTM(input_size, hidden_size, num_layers).state_dict())

    Raises:
        ValueError: if they do not fit: other sizes or layers, two directions, projections, no biases. Nothing is
            copied then.
    """
    named = _named(module)
    problems = [f"no {name}" for name in named if name not in state_dict]
    problems += [f"{name}, which has no place here" for name in state_dict if name not in named]
    for name in named.keys() & state_dict.keys():
        if state_dict[name].shape != named[name].shape:
            problems.append(f"{name} of shape {tuple(state_dict[name].shape)} for {tuple(named[name].shape)}")
    if problems:
        raise ValueError(f"state_dict: does not fit a {type(module).__name__}: it has {', '.join(sorted(problems))}")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(state_dict[name])


def _named(module: RNNCell | LSTMCell | StackedLSTM) -> dict[str, nn.Parameter]:
    """Our parameters by the names that torch gives them."""
    cells = module.layers if isinstance(module, StackedLSTM) else [module]
    named = {}
    for layer, cell in enumerate(cells):
        for part, linear in (("ih", cell.i2h), ("hh", cell.h2h)):
            named[f"weight_{part}_l{layer}"] = linear.weight
            named[f"bias_{part}_l{layer}"] = linear.bias
    return named
