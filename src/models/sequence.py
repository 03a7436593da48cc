"""Sequence models: a recurrent cell unrolled over time, and a linear head on its last state or on every step."""

import torch
from torch import Tensor, nn

from ..options import PositiveInt, Probability
from ..spec import DataSpec
from .recurrent import LSTMCell, RNNCell, StackedLSTM


class SequenceModel(nn.Module):
    """What the three models below share: reading an image as rows, and the head.

    A subclass says in `unroll` how `(B, T, F)` becomes hidden states `(B, T, H)`.

    Args:
        spec: of sequences, or of images, which are read row by row: `(C, H, W)` → H steps of C·W features.
        hidden_size: units of the recurrent state, which the head reads.
    """

    accepts = ("image", "sequence")

    def __init__(self, spec: DataSpec, hidden_size: PositiveInt = 128):
        super().__init__()
        self.every_step = spec.target == "class_per_step"
        self.head = nn.Linear(hidden_size, spec.num_outputs)

    def unroll(self, x: Tensor) -> Tensor:
        """`x: (B, T, F)` → hidden states `(B, T, H)`, or `(B, 1, H)` with the last one alone."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Sequences `(B, T, F)` or images `(B, C, H, W)` → `(B, num_outputs)`, or `(B, T, num_outputs)` per step."""
        if x.dim() == 4:
            x = x.transpose(1, 2).flatten(start_dim=2)  # (B, C, H, W) -> (B, H, C·W)
        hidden = self.unroll(x)
        return self.head(hidden if self.every_step else hidden[:, -1])


class RNNCellModel(SequenceModel):
    """An RNNCell unrolled over time. Arguments as SequenceModel."""

    def __init__(self, spec: DataSpec, hidden_size: PositiveInt = 128):
        super().__init__(spec, hidden_size)
        self.cell = RNNCell(spec.sequence_shape[1], hidden_size)

    def unroll(self, x: Tensor) -> Tensor:
        """`x: (B, T, F)` → `(B, T, H)`."""
        hidden, states = None, []
        for step in x.unbind(dim=1):
            hidden = self.cell(step, hidden)
            states.append(hidden)
        return torch.stack(states, dim=1)


class LSTMCellModel(SequenceModel):
    """An LSTMCell unrolled over time. Arguments as SequenceModel."""

    def __init__(self, spec: DataSpec, hidden_size: PositiveInt = 128):
        super().__init__(spec, hidden_size)
        self.cell = LSTMCell(spec.sequence_shape[1], hidden_size)

    def unroll(self, x: Tensor) -> Tensor:
        """`x: (B, T, F)` → `(B, T, H)`."""
        states, outputs = None, []
        for step in x.unbind(dim=1):
            states = self.cell(step, states)
            outputs.append(states[0])
        return torch.stack(outputs, dim=1)


class StackedLSTMModel(SequenceModel):
    """A StackedLSTM over the whole sequence.

    Args:
        spec, hidden_size: as SequenceModel.
        num_layers: LSTM layers, each of `hidden_size` units.
        dropout: between the layers.
    """

    def __init__(
        self,
        spec: DataSpec,
        hidden_size: PositiveInt = 128,
        num_layers: PositiveInt = 2,
        dropout: Probability = 0.5,
    ):
        super().__init__(spec, hidden_size)
        self.lstm = StackedLSTM(num_layers, spec.sequence_shape[1], hidden_size, dropout)

    def unroll(self, x: Tensor) -> Tensor:
        """`x: (B, T, F)` → `(B, T, H)`."""
        return self.lstm(x)[0]
