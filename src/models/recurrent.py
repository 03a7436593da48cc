"""The recurrent cells as a textbook writes them: RNNCell, LSTMCell, and stacked LSTMCells.

With the same weights they equal nn.RNNCell, nn.LSTMCell and nn.LSTM: `i2h` holds torch's `weight_ih` and `bias_ih`,
`h2h` holds `weight_hh` and `bias_hh`, and the gates have torch's order. The cells define the model. Whole sequences can
run through torch's kernels with the cells' own weights; see `backend` of `unroll`.

Shapes: B sequences in a batch, T steps, F input features, H hidden units, L layers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..options.types import Fraction, PositiveInt, Range
from . import fused

States = tuple[Tensor, Tensor]
Backend = Literal["auto", "reference", "fused"]


def reset_recurrent_parameters(i2h: nn.Linear, h2h: nn.Linear, hidden_size: int) -> None:
    """Initialize input weights and biases from U(−1/√H, 1/√H), as torch does, and recurrent weights orthogonally.

    A gate with orthogonal weights keeps the state from vanishing and exploding (Saxe, McClelland & Ganguli 2014).
    """
    bound = 1 / math.sqrt(hidden_size)
    for parameter in (i2h.weight, i2h.bias, h2h.bias):
        nn.init.uniform_(parameter, -bound, bound)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, a QR decomposition rounds differently, and waits long on a loaded machine
    try:
        for gate in h2h.weight.split(hidden_size):
            nn.init.orthogonal_(gate)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def open_forget_gate(input_bias: Tensor, state_bias: Tensor, hidden_size: int, memory_steps: int | None) -> None:
    """Set the biases `(4H,)` of the forget and input gates, so that an LSTM remembers from the start.

    Without `memory_steps`, forget gates have a bias of 1 (Gers et al. 2000; Jozefowicz et al. 2015), which forgets half
    within three steps. With `memory_steps` T, units start with memories of all lengths up to T steps: forget biases are
    log U(1, T − 1), input biases their negatives (Tallec & Ollivier 2018).
    """
    input_gate, forget_gate = slice(0, hidden_size), slice(hidden_size, 2 * hidden_size)
    input_bias[forget_gate], state_bias[forget_gate] = 1, 0
    if memory_steps is not None:
        input_bias[forget_gate] = torch.empty_like(input_bias[forget_gate]).uniform_(1, memory_steps - 1).log()
        input_bias[input_gate], state_bias[input_gate] = -input_bias[forget_gate], 0


class Recurrent(nn.Module):
    """Keeps the weights of its cells in one block of a GPU's memory, as nn.RNN and nn.LSTM do."""

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # `to`, `cuda`, `half` and the like
        fused.flatten_parameters(getattr(self, "cells", [self]), "RNN_TANH" if isinstance(self, RNNCell) else "LSTM")
        return self


class RNNCell(Recurrent):
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
        """Compute one step: `input: (B, F)`, `hidden: (B, H)` (default: zeros) → the next hidden state `(B, H)`."""
        if hidden is None:
            hidden = input.new_zeros(input.shape[0], self.hidden_size)
        return torch.tanh(self.i2h(input) + self.h2h(hidden))


class LSTMCell(Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber 1997) with the forget gate of Gers et al. (2000).

    Args:
        input_size: features F of a step.
        hidden_size: units H of the state.
        memory_steps: how many steps the cell has to remember, if known; see `open_forget_gate`.
    """

    def __init__(self, input_size: int, hidden_size: int, memory_steps: int | None = None):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size, 4 * hidden_size)
        self.h2h = nn.Linear(hidden_size, 4 * hidden_size)
        reset_recurrent_parameters(self.i2h, self.h2h, hidden_size)
        open_forget_gate(self.i2h.bias, self.h2h.bias, hidden_size, memory_steps)

    def forward(self, input: Tensor, states: States | None = None) -> States:
        """Compute one step: `input: (B, F)`, `(hx, cx)` of `(B, H)` each (default: zeros) → the next `(hx, cx)`."""
        if states is None:
            zeros = input.new_zeros(input.shape[0], self.hidden_size)
            states = (zeros, zeros)
        hx, cx = states
        gates = self.i2h(input) + self.h2h(hx)  # (B, 4H)
        in_gate, forget_gate, candidate, out_gate = gates.chunk(4, dim=1)
        cx = torch.sigmoid(forget_gate) * cx + torch.sigmoid(in_gate) * torch.tanh(candidate)
        hx = torch.sigmoid(out_gate) * torch.tanh(cx)
        return hx, cx


def unroll(
    cell: RNNCell | LSTMCell, input: Tensor, states: Any = None, backend: Backend = "auto"
) -> tuple[Tensor, Any]:
    """Run a cell over a sequence.

    Args:
        cell: the cell that is run.
        input: `(B, T, F)`.
        states: `(B, H)` for an RNNCell, `(hx, cx)` of `(B, H)` each for an LSTMCell; default: zeros.
        backend: `reference` calls the cell at every step; `fused` runs the whole sequence through kernels that read the
            cell's parameters; `auto` is `fused` where that can run, and otherwise `reference`. The results are the
            same. Second derivatives need `reference`.

    Returns:
        The hidden states `(B, T, H)`, and the final states in the form of `states`.

    Raises:
        ValueError: for an empty input, for states that do not fit, and for `fused` where it cannot run.
    """
    _check_input(cell, input)
    is_lstm = isinstance(cell, LSTMCell)
    _check_states("states", states, (input.shape[0], cell.hidden_size), pair=is_lstm)
    if not runs_fused(backend, [cell], input):
        outputs = []
        for x in input.unbind(dim=1):
            states = cell(x, states)
            outputs.append(states[0] if is_lstm else states)
        return torch.stack(outputs, dim=1), states
    if isinstance(cell, LSTMCell):
        layer_states = None if states is None else (states[0][None], states[1][None])
        hidden, (hx, cx) = fused.lstm([cell], input, layer_states, 0.0, cell.training)
        return hidden, (hx[0], cx[0])
    return fused.rnn(cell, input, states)


class StackedLSTM(Recurrent):
    """Stacked LSTM cells: each layer reads the hidden states of the layer below, with dropout in between.

    Args:
        num_layers: the number of layers L.
        input_size: features F of a step.
        hidden_size: units H of each layer.
        dropout: the probability of dropping a value between two layers.
        backend: as in `unroll`. The backends draw different dropout masks from the same distribution.
        memory_steps: as in LSTMCell.
    """

    def __init__(
        self,
        num_layers: PositiveInt,
        input_size: PositiveInt,
        hidden_size: PositiveInt,
        dropout: Fraction = 0.5,
        backend: Literal["auto", "reference", "fused"] = "auto",
        memory_steps: Annotated[int, Range(3)] | None = None,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.backend: Backend = backend
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(LSTMCell(size, hidden_size, memory_steps) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    @property
    def cells(self) -> Sequence[LSTMCell]:
        """The layers, lowest first."""
        return cast(Sequence[LSTMCell], self.layers)

    def forward(self, input: Tensor, initial_states: States | None = None) -> tuple[Tensor, States]:
        """Run the layers over `input: (B, T, F)`; `initial_states: (hx, cx)` of `(L, B, H)` each, default zeros.

        Returns `outputs, (hx, cx)`: the last layer's hidden states `(B, T, H)`, as `nn.LSTM(batch_first=True)` returns
        them, and the final states. Raises ValueError as `unroll`.
        """
        shape = (len(self.cells), input.shape[0], self.hidden_size)
        _check_input(self.cells[0], input)
        _check_states("initial_states", initial_states, shape, pair=True)
        if runs_fused(self.backend, self.cells, input, self.dropout):
            return fused.lstm(self.cells, input, initial_states, self.dropout.p, self.dropout.training)
        if initial_states is None:
            zeros = input.new_zeros(shape)
            initial_states = (zeros, zeros)
        hx, cx = (list(state.unbind(0)) for state in initial_states)  # new lists: the caller's states stay unchanged
        outputs = []
        for x in input.unbind(dim=1):
            for layer, cell in enumerate(self.cells):
                if layer > 0:
                    x = self.dropout(x)
                hx[layer], cx[layer] = cell(x, (hx[layer], cx[layer]))
                x = hx[layer]
            outputs.append(x)
        return torch.stack(outputs, dim=1), (torch.stack(hx), torch.stack(cx))


def runs_fused(
    backend: Backend, cells: Sequence[RNNCell | LSTMCell], input: Tensor, dropout: nn.Module | None = None
) -> bool:
    """Whether these cells run as one call on this input `(B, T, F)`, rather than step by step.

    Raises:
        ValueError: for an unknown backend, and for `fused` where it cannot run.
    """
    if backend not in ("auto", "reference", "fused"):
        raise ValueError(f"backend: got {backend!r}, takes auto, reference or fused")
    if backend == "reference":
        return False
    forwards = (RNNCell.forward, LSTMCell.forward)  # the only ones that the kernels compute
    custom = [type(cell).__name__ for cell in cells if type(cell).forward not in forwards or "forward" in vars(cell)]
    obstacle = f"a {custom[0]} with its own forward" if custom else fused.obstacle(cells, input, dropout)
    if obstacle and backend == "fused":
        raise ValueError(f"backend: fused cannot run {obstacle}; auto and reference can")
    return obstacle is None


def _check_input(cell: RNNCell | LSTMCell, input: Tensor) -> None:
    features = getattr(cell.i2h, "in_features", None)
    if input.dim() != 3 or (features is not None and input.shape[-1] != features):
        raise ValueError(f"input: got {tuple(input.shape)}, takes (B, T, {features})")
    if 0 in input.shape[:-1]:
        empty = "a batch" if input.shape[0] == 0 else "sequences"
        raise ValueError(f"input: got {tuple(input.shape)}, {empty} of length 0")


def _check_states(name: str, states: Any, shape: tuple[int, ...], pair: bool) -> None:
    """Raise ValueError for states that torch would broadcast or unpack."""
    if states is None:
        return
    if isinstance(states, Tensor) == pair or (pair and len(states) != 2):
        raise ValueError(f"{name}: takes {'a pair (hx, cx)' if pair else 'one tensor'} of shape {shape}")
    for state in states if pair else [states]:
        if tuple(state.shape) != shape:
            raise ValueError(f"{name}: got a state of shape {tuple(state.shape)}, takes {shape}")
