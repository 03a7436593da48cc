"""The recurrent cells, readable next to a textbook: RNNCell, LSTMCell, and LSTMCells stacked.

They equal torch's nn.RNNCell, nn.LSTMCell and nn.LSTM with the same weights: `i2h` holds what torch calls `weight_ih`
and `bias_ih`, `h2h` holds `weight_hh` and `bias_hh`, and the gates come in torch's order.
"""

import math

import torch
from torch import Tensor, nn

from ..options import PositiveInt, Probability

States = tuple[Tensor, Tensor]


def reset_recurrent_parameters(i2h: nn.Linear, h2h: nn.Linear, hidden_size: int) -> None:
    """Start a cell so that it can learn over long times.

    Input weights and biases from U(−1/√H, 1/√H), as torch's own recurrent modules; the recurrent weights of every gate
    orthogonal, so that the state neither dies nor explodes (Saxe, McClelland & Ganguli 2014).
    """
    bound = 1 / math.sqrt(hidden_size)
    for parameter in (i2h.weight, i2h.bias, h2h.bias):
        nn.init.uniform_(parameter, -bound, bound)
    for gate in h2h.weight.split(hidden_size):
        nn.init.orthogonal_(gate)


class RNNCell(nn.Module):
    """An Elman cell (Elman 1990): `h' = tanh(W_ih x + b_ih + W_hh h + b_hh)`.

    Args:
        input_size: features F of a step.
        hidden_size: units H of the state.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size, hidden_size)
        self.h2h = nn.Linear(hidden_size, hidden_size)
        reset_recurrent_parameters(self.i2h, self.h2h, hidden_size)

    def forward(self, input: Tensor, hidden: Tensor | None = None) -> Tensor:
        """One step: `input: (B, F)`, `hidden: (B, H)` (zeros when left out) → the next hidden state `(B, H)`."""
        if hidden is None:
            hidden = input.new_zeros(input.shape[0], self.hidden_size)
        return torch.tanh(self.i2h(input) + self.h2h(hidden))


class LSTMCell(nn.Module):
    """Long short-term memory (Hochreiter & Schmidhuber 1997) with the forget gate of Gers et al. (2000).

    Args:
        input_size: features F of a step.
        hidden_size: units H of the state.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size, 4 * hidden_size)
        self.h2h = nn.Linear(hidden_size, 4 * hidden_size)
        reset_recurrent_parameters(self.i2h, self.h2h, hidden_size)
        with torch.no_grad():  # a forget gate that starts open (Gers et al. 2000; Jozefowicz et al. 2015)
            self.i2h.bias[hidden_size : 2 * hidden_size] = 1
            self.h2h.bias[hidden_size : 2 * hidden_size] = 0

    def forward(self, input: Tensor, states: States | None = None) -> States:
        """One step: `input: (B, F)`, `(hx, cx)` of `(B, H)` each (zeros when left out) → the next `(hx, cx)`."""
        if states is None:
            zeros = input.new_zeros(input.shape[0], self.hidden_size)
            states = (zeros, zeros)
        hx, cx = states
        gates = self.i2h(input) + self.h2h(hx)  # (B, 4H)
        in_gate, forget_gate, candidate, out_gate = gates.chunk(4, dim=1)
        cx = torch.sigmoid(forget_gate) * cx + torch.sigmoid(in_gate) * torch.tanh(candidate)
        hx = torch.sigmoid(out_gate) * torch.tanh(cx)
        return hx, cx


class StackedLSTM(nn.Module):
    """LSTM cells stacked: each layer reads the hidden states of the layer below, with dropout in between.

    Args:
        num_layers: layers L.
        input_size: features F of a step.
        hidden_size: units H of every layer.
        dropout: the probability that a value passed up to the next layer is dropped; not after the last layer.
    """

    def __init__(
        self, num_layers: PositiveInt, input_size: PositiveInt, hidden_size: PositiveInt, dropout: Probability = 0.5
    ):
        super().__init__()
        self.hidden_size = hidden_size
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(LSTMCell(size, hidden_size) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor, initial_states: States | None = None) -> tuple[Tensor | list[Tensor], States]:
        """A whole sequence or a single step.

        Args:
            input: `(B, T, F)`, or `(B, F)` for one step.
            initial_states: `(hx, cx)`, each `(L, B, H)`; zeros when left out. Never changed in place.

        Returns:
            `outputs, (hx, cx)`: the last layer's hidden states `(B, T, H)`, as `nn.LSTM(batch_first=True)` gives them
            (for a single step: the list of every layer's output, `(B, H)` each), and the final states `(L, B, H)`.
        """
        single_step = input.dim() == 2
        hx, cx = self._unstack(initial_states, input)
        outputs = []
        for x in [input] if single_step else input.unbind(dim=1):
            step_outputs = []
            for index, cell in enumerate(self.layers):
                if index > 0:
                    x = self.dropout(x)
                hx[index], cx[index] = cell(x, (hx[index], cx[index]))
                x = hx[index]
                step_outputs.append(x)
            outputs.append(x)
        states = (torch.stack(hx), torch.stack(cx))
        return (step_outputs if single_step else torch.stack(outputs, dim=1)), states

    def _unstack(self, states: States | None, input: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """One tensor a layer, in lists of our own, so that a caller's states stay as they are."""
        if states is None:
            zeros = input.new_zeros(input.shape[0], self.hidden_size)
            return [zeros] * len(self.layers), [zeros] * len(self.layers)
        hx, cx = states
        return list(hx.unbind(0)), list(cx.unbind(0))
