"""Copy weights to and from torch's recurrent modules, which name the same numbers differently."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .recurrent import LSTMCell, RNNCell, StackedLSTM


def torch_state_dict(module: RNNCell | LSTMCell | StackedLSTM) -> dict[str, Tensor]:
    """A state_dict for `nn.LSTM` (from an LSTMCell or a StackedLSTM) or `nn.RNN` (from an RNNCell).

        theirs = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        theirs.load_state_dict(torch_state_dict(ours))

    The tensors are copies. Per layer: `weight_ih_l0: (4H, F)`, `weight_hh_l0: (4H, H)`, `bias_ih_l0` and
    `bias_hh_l0: (4H,)`; for an RNNCell H instead of 4H.
    """
    return {name: parameter.detach().clone() for name, parameter in _named(module).items()}


def load_torch_state_dict(module: RNNCell | LSTMCell | StackedLSTM, state_dict: Mapping[str, Tensor]) -> None:
    """Copy the weights of an `nn.LSTM`, or of an `nn.RNN` with tanh, into a module of the same size.

        load_torch_state_dict(ours, nn.LSTM(input_size, hidden_size, num_layers).state_dict())

    Raises:
        ValueError: for other sizes or layers, two directions, projections or missing biases; nothing is copied then.
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


def _named(module: RNNCell | LSTMCell | StackedLSTM) -> dict[str, Tensor]:
    """The module's parameters by torch's names."""
    named: dict[str, Tensor] = {}
    for layer, cell in enumerate(module.cells if isinstance(module, StackedLSTM) else [module]):
        for part, linear in (("ih", cell.i2h), ("hh", cell.h2h)):
            named[f"weight_{part}_l{layer}"] = linear.weight
            named[f"bias_{part}_l{layer}"] = linear.bias
    return named
