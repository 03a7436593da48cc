"""The recurrent cells, readable next to a textbook: RNNCell, LSTMCell, and LSTMCells stacked.

They equal torch's nn.RNNCell, nn.LSTMCell and nn.LSTM with the same weights: `i2h` holds what torch calls `weight_ih`
and `bias_ih`, `h2h` holds `weight_hh` and `bias_hh`, and the gates come in torch's order.

The cells are the definition. A whole sequence need not be paid for cell by cell: see `backend` of `unroll`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Self

import torch
from torch import Tensor, nn

from ..options.types import Fraction, PositiveInt, Range
from . import fused

States = tuple[Tensor, Tensor]
Backend = Literal["auto", "reference", "fused"]


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


@torch.no_grad()
def open_forget_gate(input_bias: Tensor, state_bias: Tensor, hidden_size: int, memory_steps: int | None) -> None:
    """Have an LSTM start by remembering: set the biases `(4H,)` of its forget gates, and of its input gates.

    Without `memory_steps` every forget gate starts with a bias of 1 (Gers et al. 2000; Jozefowicz et al. 2015), which
    forgets half within three steps. With it the units start with memories of all lengths up to that many steps: forget
    biases from log U(1, T − 1), and input gates as far closed as those are open (Tallec & Ollivier 2018).
    """
    input_gate, forget_gate = slice(0, hidden_size), slice(hidden_size, 2 * hidden_size)
    input_bias[forget_gate], state_bias[forget_gate] = 1, 0
    if memory_steps is not None:
        input_bias[forget_gate] = torch.empty_like(input_bias[forget_gate]).uniform_(1, memory_steps - 1).log()
        input_bias[input_gate], state_bias[input_gate] = -input_bias[forget_gate], 0


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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Whatever moves or converts parameters comes through here, as in `nn.LSTM`."""
        super()._apply(fn, recurse)
        fused.flatten_parameters([self], "RNN_TANH")
        return self

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
        memory_steps: how far back there is something to remember, if that is known; see `open_forget_gate`.
    """

    def __init__(self, input_size: int, hidden_size: int, memory_steps: int | None = None):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size, 4 * hidden_size)
        self.h2h = nn.Linear(hidden_size, 4 * hidden_size)
        reset_recurrent_parameters(self.i2h, self.h2h, hidden_size)
        open_forget_gate(self.i2h.bias, self.h2h.bias, hidden_size, memory_steps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Whatever moves or converts parameters comes through here, as in `nn.LSTM`."""
        super()._apply(fn, recurse)
        fused.flatten_parameters([self], "LSTM")
        return self

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


def unroll(
    cell: RNNCell | LSTMCell, input: Tensor, states: Tensor | States | None = None, backend: Backend = "auto"
) -> tuple[Tensor, Tensor | States]:
    """Run one cell over a sequence, or over a single step of one.

    Args:
        cell: an RNNCell or an LSTMCell.
        input: `(B, T, F)`, or `(B, F)` for one step.
        states: what the cell takes, `(B, H)` or `(hx, cx)` of `(B, H)` each; zeros when left out.
        backend: `reference` calls the cell at every step; `fused` runs the whole sequence through kernels that take
            the cell's parameters, with the same results; `auto` is `fused` for sequences and `reference` for a single
            step, and for whatever `fused` cannot run. Second derivatives need `reference`.

    Returns:
        The hidden states `(B, T, H)`, or `(B, H)` of a single step, and the final states as the cell takes them.

    Raises:
        ValueError: for an empty input, for states that do not fit it, and where `fused` cannot run; it names the
            argument.
    """
    is_lstm = isinstance(cell, LSTMCell)
    _check_input(cell, input)
    _check_states("states", states, input, (input.shape[0], cell.hidden_size), pair=is_lstm)
    single_step = input.dim() == 2
    if runs_fused(backend, [cell], input):
        sequence = input[:, None] if single_step else input
        if is_lstm:
            stacked = None if states is None else (states[0][None], states[1][None])
            outputs, (hx, cx) = fused.lstm([cell], sequence, stacked, 0.0, cell.training)
            states = (hx[0], cx[0])
        else:
            outputs, states = fused.rnn(cell, sequence, states)
        return (outputs[:, 0] if single_step else outputs), states
    outputs = []
    for step in [input] if single_step else input.unbind(dim=1):
        states = cell(step, states)
        outputs.append(states[0] if is_lstm else states)
    return (outputs[0] if single_step else torch.stack(outputs, dim=1)), states


class StackedLSTM(nn.Module):
    """LSTM cells stacked: each layer reads the hidden states of the layer below, with dropout in between.

    Args:
        num_layers: layers L.
        input_size: features F of a step.
        hidden_size: units H of every layer.
        dropout: the probability that a value passed up to the next layer is dropped; not after the last layer.
        backend: as of `unroll`; what is dropped is drawn from the same distribution, but not the same.
        memory_steps: as of LSTMCell.
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
        self.backend = backend
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(LSTMCell(size, hidden_size, memory_steps) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Whatever moves or converts parameters comes through here, as in `nn.LSTM`."""
        super()._apply(fn, recurse)
        fused.flatten_parameters(self.layers, "LSTM")
        return self

    def forward(self, input: Tensor, initial_states: States | None = None) -> tuple[Tensor | list[Tensor], States]:
        """A whole sequence or a single step.

        Args:
            input: `(B, T, F)`, or `(B, F)` for one step.
            initial_states: `(hx, cx)`, each `(L, B, H)`; zeros when left out. Never changed in place.

        Returns:
            `outputs, (hx, cx)`: the last layer's hidden states `(B, T, H)`, as `nn.LSTM(batch_first=True)` gives them
            (for a single step: the list of every layer's output, `(B, H)` each), and the final states `(L, B, H)`.

        Raises:
            ValueError: as `unroll`.
        """
        shape = (len(self.layers), input.shape[0], self.hidden_size)
        _check_input(self.layers[0], input)
        _check_states("initial_states", initial_states, input, shape, pair=True)
        single_step = input.dim() == 2
        if runs_fused(self.backend, self.layers, input, self.dropout):
            sequence = input[:, None] if single_step else input
            outputs, states = fused.lstm(self.layers, sequence, initial_states, self.dropout.p, self.dropout.training)
            return (list(states[0].unbind(0)) if single_step else outputs), states
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


def runs_fused(
    backend: Backend, cells: Sequence[RNNCell | LSTMCell], input: Tensor, dropout: nn.Module | None = None
) -> bool:
    """Whether these cells run at once on this input, `(B, T, F)` or `(B, F)`, rather than step by step.

    Raises:
        ValueError: for an unknown backend, and for `fused` where it cannot run.
    """
    if backend not in ("auto", "reference", "fused"):
        raise ValueError(f"backend: got {backend!r}, takes auto, reference or fused")
    if backend == "reference":
        return False
    if backend == "auto" and input.dim() == 2:
        return False
    reason = fused.why_not(cells, input, dropout)
    if reason and backend == "fused":
        raise ValueError(f"backend: fused cannot run {reason}; auto and reference can")
    return reason is None


def _check_input(cell: RNNCell | LSTMCell, input: Tensor) -> None:
    features = getattr(cell.i2h, "in_features", None)
    if input.dim() not in (2, 3) or (features is not None and input.shape[-1] != features):
        raise ValueError(f"input: got {tuple(input.shape)}, takes (B, T, {features}) or, for one step, (B, {features})")
    if 0 in input.shape[:-1]:
        what = "a batch" if input.shape[0] == 0 else "sequences"
        raise ValueError(f"input: got {tuple(input.shape)}, {what} of length 0")


def _check_states(name: str, states: Tensor | States | None, input: Tensor, shape: tuple[int, ...], pair: bool) -> None:
    if states is None:
        return
    if isinstance(states, Tensor) == pair or (pair and len(states) != 2):
        raise ValueError(f"{name}: takes {'a pair (hx, cx)' if pair else 'one tensor'} of shape {shape}")
    for state in states if pair else [states]:
        if tuple(state.shape) != shape:
            raise ValueError(f"{name}: got a state of shape {tuple(state.shape)}, takes {shape}")
        if state.device != input.device:
            raise ValueError(f"{name}: got a state on {state.device}, the input is on {input.device}")
        if state.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
            raise ValueError(f"{name}: got a state of {state.dtype}, the input is {input.dtype}")
