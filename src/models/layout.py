"""Copies of recurrent weights by the names that torch's modules give the same numbers."""

from torch import Tensor

from .recurrent import LSTMCell, RNNCell, StackedLSTM


def torch_state_dict(module: RNNCell | LSTMCell | StackedLSTM) -> dict[str, Tensor]:
    """A state_dict for `nn.LSTM` (from an LSTMCell or a StackedLSTM) or `nn.RNN` (from an RNNCell).

        theirs = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        theirs.load_state_dict(torch_state_dict(ours))

    The tensors are copies. Per layer: `weight_ih_l0: (4H, F)`, `weight_hh_l0: (4H, H)`, `bias_ih_l0` and
    `bias_hh_l0: (4H,)`; for an RNNCell H instead of 4H.
    """
    return {
        f"{kind}_{part}_l{layer}": getattr(linear, kind).detach().clone()
        for layer, cell in enumerate(module.cells if isinstance(module, StackedLSTM) else [module])
        for part, linear in (("ih", cell.i2h), ("hh", cell.h2h))
        for kind in ("weight", "bias")
    }
