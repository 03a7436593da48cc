"""Whole sequences at once: the weights of readable cells, run by torch's own kernels (oneDNN or native, cuDNN, Metal).

The cells stay the definition: what is here takes their parameters as they are and computes what unrolling them would.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from .elman import ElmanSequence


def why_not(cells: Sequence[nn.Module], input: Tensor, dropout: nn.Module | None = None) -> str | None:
    """What keeps these cells from being run at once on this input, or None.

    A kernel reads weights and calls no module: whatever somebody has put into the cells, or in between, would be left
    out without a word.
    """
    if not input.is_floating_point():
        return f"numbers of type {input.dtype}"
    parts = [dropout] if dropout is not None else []
    for cell in cells:
        linears = (cell.i2h, cell.h2h)
        for linear in linears:
            if (
                not isinstance(linear, nn.Linear)
                or type(linear).forward is not nn.Linear.forward
                or linear.bias is None
            ):
                return f"a cell that computes with a {type(linear).__module__}.{type(linear).__name__}"
        parts += (cell, *linears)
    for part in parts:
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"a {type(part).__name__} that has hooks"
    return None


@torch._disable_dynamo  # as nn.LSTM, torch.compile runs a sequence as it is and compiles what is around it
def lstm(
    cells: Sequence[nn.Module], input: Tensor, states: tuple[Tensor, Tensor] | None, dropout: float, training: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Stacked LSTM cells over a sequence.

    Args:
        cells: L cells with `i2h` and `h2h`, lowest first.
        input: `(B, T, F)`.
        states: `(hx, cx)`, each `(L, B, H)`; zeros when left out.
        dropout: the probability that a value passed up to the next layer is dropped, while `training`.

    Returns:
        The last layer's hidden states `(B, T, H)`, and the final `(hx, cx)`, each `(L, B, H)`.
    """
    weights = _weights(cells)
    hidden_size = cells[0].hidden_size
    input = _as_autocast(input)
    if states is None:
        zeros = input.new_zeros(len(cells), input.shape[0], hidden_size)
        states = (zeros, zeros)
    # `train` asks for what the backward pass needs, which an evaluated model may want too; dropout is another matter.
    train = training or torch.is_grad_enabled()
    probability = dropout if training else 0.0
    states = [_as_autocast(state).contiguous() for state in states]
    output, hx, cx = torch.lstm(input, states, weights, True, len(cells), probability, train, False, True)
    return output, (hx, cx)


@torch._disable_dynamo
def rnn(cell: nn.Module, input: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """An Elman cell over a sequence: `input: (B, T, F)`, `hidden: (B, H)` → `(B, T, H)`, and the final `(B, H)`.

    On a CPU torch unrolls nn.RNN operation by operation, so a function of our own takes its place there.
    """
    weights = _weights([cell])
    if hidden is None:
        hidden = input.new_zeros(input.shape[0], cell.hidden_size)
    if input.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        output, hidden = ElmanSequence.apply(input.transpose(0, 1), hidden, *weights)
        return output.transpose(0, 1), hidden
    train = cell.training or torch.is_grad_enabled()
    output, hidden = torch.rnn_tanh(input, hidden[None].contiguous(), weights, True, 1, 0.0, train, False, True)
    return output, hidden[0]


def flatten_parameters(cells: Sequence[nn.Module], mode: Literal["LSTM", "RNN_TANH"]) -> None:
    """Put the parameters of cells on a GPU into one block of memory, which cuDNN would otherwise make at every call.

    The parameters stay the objects that they are, as in `nn.LSTM.flatten_parameters`. Call it where a module's
    parameters are moved anyway, never in a forward pass: there FSDP shows gathered parameters, and its next all-gather
    fills the memory that they had before. Sharded parameters are left alone.

    Args:
        cells: as of `lstm`, lowest first; several of mode `LSTM` only.
        mode: what cuDNN calls the kind of the cells.
    """
    weights = [linear._parameters.get(name) for c in cells for name in ("weight", "bias") for linear in (c.i2h, c.h2h)]
    # The exact type: a sharded parameter is a DTensor, and other subclasses have rules of their own.
    if not all(type(weight) is nn.Parameter and _runs_on_cudnn(weight) for weight in weights):
        return
    if len({weight.dtype for weight in weights}) > 1:
        return
    in_one_block = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    shared = len({weight.data_ptr() for weight in weights}) < len(weights)
    if in_one_block or shared:
        return
    from torch.backends.cudnn import rnn as cudnn

    first, hidden_size = weights[0], cells[0].hidden_size
    with torch.no_grad(), torch.cuda.device_of(first):
        torch._cudnn_rnn_flatten_weight(
            weights, 4, first.shape[1], cudnn.get_cudnn_mode(mode), hidden_size, 0, len(cells), True, False
        )


def _runs_on_cudnn(weight: Tensor) -> bool:
    return weight.is_cuda and torch.backends.cudnn.is_acceptable(weight) and torch._use_cudnn_rnn_flatten_weight()


def _as_autocast(tensor: Tensor) -> Tensor:
    """The tensor in the type that autocast computes in on a CPU; unchanged elsewhere.

    torch chooses oneDNN's LSTM by the type of its input, and autocast converts that input afterwards. A processor for
    which oneDNN has no LSTM of the converted type would raise an error. A converted input lets torch choose by the type
    that is computed in.
    """
    if tensor.device.type != "cpu" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled("cpu"):
        return tensor  # autocast leaves float64 alone
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _weights(cells: Sequence[nn.Module]) -> list[Tensor]:
    """In the order in which torch takes them: input weights, recurrent weights, and their biases, layer by layer."""
    return [w for c in cells for w in (c.i2h.weight, c.h2h.weight, c.i2h.bias, c.h2h.bias)]
