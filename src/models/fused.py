"""Run whole sequences in one call of torch's kernels (oneDNN or native, cuDNN, Metal), with the weights of the cells.

The cells define the model. The functions here read the cells' parameters and compute the same as unrolling the cells.

Shapes: B sequences in a batch, T steps, F input features, H hidden units, L layers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from .elman import ElmanSequence

if TYPE_CHECKING:
    from .recurrent import LSTMCell, RNNCell

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def obstacle(cells: "Sequence[RNNCell | LSTMCell]", input: Tensor, dropout: nn.Module | None = None) -> str | None:
    """Return in words what prevents these cells from running as one call on this input, or None.

    A kernel reads weights and calls no module, so it would silently skip a user's hooks and replaced layers.
    """
    if not input.is_floating_point():
        return f"numbers of type {input.dtype}"
    linears = [linear for cell in cells for linear in (cell.i2h, cell.h2h)]
    for linear in linears:
        is_plain = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
        if not is_plain or linear.bias is None:
            return f"a cell that computes with a {type(linear).__module__}.{type(linear).__name__}"
    if dropout is not None and type(dropout) is not nn.Dropout:
        return f"a {type(dropout).__name__} in place of nn.Dropout"
    for module in [*cells, *linears, *([dropout] if dropout is not None else [])]:
        if any(getattr(module, name) for name in _HOOKS):
            return f"a {type(module).__name__} that has hooks"
    return None


# As with nn.LSTM, torch.compile does not compile the sequence, only the code around it. `torch.compiler.disable` does
# the same, but the decorator imports torch._dynamo, which takes seconds.
@torch._disable_dynamo
def lstm(
    cells: "Sequence[LSTMCell]", input: Tensor, states: tuple[Tensor, Tensor] | None, dropout: float, training: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run LSTM cells, lowest first, over `input: (B, T, F)`; `states: (hx, cx)` of `(L, B, H)` each, default zeros.

    Returns the last layer's hidden states `(B, T, H)`, and the final `(hx, cx)`. `dropout` is the probability of
    dropping a value between two layers while `training`.
    """
    input = _as_autocast(input)
    if states is None:
        zeros = input.new_zeros(len(cells), input.shape[0], cells[0].hidden_size)
        states = (zeros, zeros)
    # `train` saves tensors for the backward pass, which a model in evaluation mode may need, too.
    train = training or torch.is_grad_enabled()
    initial = [_as_autocast(state).contiguous() for state in states]
    probability = dropout if training else 0.0
    output, hx, cx = torch.lstm(input, initial, _weights(cells), True, len(cells), probability, train, False, True)
    return output, (hx, cx)


@torch._disable_dynamo
def rnn(cell: "RNNCell", input: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run an Elman cell over a sequence: `input: (B, T, F)`, `hidden: (B, H)` → `(B, T, H)` and the final `(B, H)`.

    On a CPU torch unrolls nn.RNN operation by operation; ElmanSequence is faster there. An export does not use it: the
    exported program would contain its in-place steps, and could not run with gradients enabled.
    """
    weights = _weights([cell])
    if hidden is None:
        hidden = input.new_zeros(input.shape[0], cell.hidden_size)
    if input.device.type == "cpu" and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_exporting()):
        output, hidden = ElmanSequence.apply(input.transpose(0, 1), hidden, *weights)
        return output.transpose(0, 1), hidden
    train = cell.training or torch.is_grad_enabled()
    output, hidden = torch.rnn_tanh(input, hidden[None].contiguous(), weights, True, 1, 0.0, train, False, True)
    return output, hidden[0]


def flatten_parameters(cells: "Sequence[RNNCell | LSTMCell]", mode: Literal["LSTM", "RNN_TANH"]) -> None:
    """Move the parameters of cells on a GPU into one block of memory; otherwise cuDNN copies them at every call.

    The parameters stay the same objects, as with `nn.LSTM.flatten_parameters`. Call it where a module's parameters are
    moved anyway, not in a forward pass, where a strategy may gather them temporarily. Sharded parameters, and those
    that cuDNN does not support, stay unchanged. `mode` is cuDNN's name for the kind of cell; `RNN_TANH` takes one cell.
    """
    from torch.backends.cudnn import rnn

    linears = [(cell.i2h, cell.h2h) for cell in cells]
    parameters = [linear._parameters.get(name) for pair in linears for name in ("weight", "bias") for linear in pair]
    # Compare the exact type: a sharded parameter is a DTensor, and other subclasses have their own rules.
    weights: list[Tensor] = [weight for weight in parameters if type(weight) is nn.Parameter and weight.is_cuda]
    if len(weights) < len(parameters) or len({weight.dtype for weight in weights}) > 1:
        return
    if not all(map(torch.backends.cudnn.is_acceptable, weights)) or not torch._use_cudnn_rnn_flatten_weight():
        return
    is_one_block = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    has_shared_weights = len({weight.data_ptr() for weight in weights}) < len(weights)
    if not is_one_block and not has_shared_weights:
        sizes = weights[0].shape[1], rnn.get_cudnn_mode(mode), cells[0].hidden_size, 0, len(cells)
        with torch.no_grad(), torch.cuda.device_of(weights[0]):
            torch._cudnn_rnn_flatten_weight(weights, 4, *sizes, True, False)


def _as_autocast(tensor: Tensor) -> Tensor:
    """Return the tensor in autocast's dtype on a CPU; unchanged on other devices.

    torch chooses oneDNN's LSTM by the dtype of the input before autocast converts it, which raises an error on a
    processor for which oneDNN has no LSTM of the converted dtype. Autocast leaves float64 unchanged.
    """
    if tensor.device.type != "cpu" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled("cpu"):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _weights(cells: "Sequence[RNNCell | LSTMCell]") -> list[Tensor]:
    """Return the weights in torch's order: input weights, recurrent weights and their biases, layer by layer."""
    return [w for c in cells for w in (c.i2h.weight, c.h2h.weight, c.i2h.bias, c.h2h.bias)]
