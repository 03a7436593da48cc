"""Sequence models: a recurrent network over time, with a linear head on the last state or on every step.

Shapes: B sequences in a batch, T steps, F input features, H hidden units, L layers; images `(B, C, height, width)`.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..data.spec import DataSpec
from ..options.types import Fraction, PositiveInt, Range
from .recurrent import Backend, LSTMCell, RNNCell, StackedLSTM, unroll


class SequenceModel(nn.Module):
    """The base class of sequence models: reads images as rows, and has the head.

    A subclass sets a `cell`, or overrides `unroll`.

    Args:
        spec: the spec of sequences, or of images, which are read row by row: `height` steps of `C·width` features.
        hidden_size: units of the recurrent state, which the head reads.
        backend: `reference` calls the cells step by step, `fused` runs whole sequences through torch's kernels with
            the same weights and results, `auto` takes the faster one that can run.
    """

    accepts = ("image", "sequence")
    cell: RNNCell | LSTMCell

    def __init__(
        self,
        spec: DataSpec,
        hidden_size: PositiveInt = 128,
        backend: Literal["auto", "reference", "fused"] = "auto",
    ):
        super().__init__()
        self.backend: Backend = backend
        self.every_step = spec.target == "class_per_step"
        self.head = nn.Linear(hidden_size, spec.num_outputs)

    def unroll(self, x: Tensor) -> Tensor:
        """Run the recurrent network: `x: (B, T, F)` → hidden states `(B, T, H)`."""
        return unroll(self.cell, x, backend=self.backend)[0]

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Map sequences `x: (B, T, F)` or images `(B, C, height, width)` to `(B, num_outputs)` or `(B, T, num_outputs)`.

        With `lengths: (B,)` sequences are padded at their ends; the head reads the last step of each that is not
        padding. Raises ValueError as `recurrent.unroll`.
        """
        if x.dim() == 4:
            x = x.transpose(1, 2).flatten(start_dim=2)  # (B, C, height, width) -> (B, height, C·width)
        hidden = self.unroll(x)
        if self.every_step:
            return self.head(hidden)
        if lengths is None:
            return self.head(hidden[:, -1])
        return self.head(hidden[torch.arange(x.shape[0], device=x.device), lengths - 1])


class RNNCellModel(SequenceModel):
    """An RNNCell unrolled over time. Arguments as SequenceModel."""

    def __init__(self, spec: DataSpec, hidden_size: PositiveInt = 128, **kwargs: Any):
        super().__init__(spec, hidden_size, **kwargs)
        self.cell = RNNCell(spec.sequence_shape[1], hidden_size)


class LSTMCellModel(SequenceModel):
    """An LSTMCell unrolled over time.

    Args:
        spec, hidden_size: as SequenceModel.
        memory_steps: how many steps the model has to remember, if known. The forget gates then start with memories of
            all lengths up to that number (Tallec & Ollivier 2018), and otherwise with a bias of 1.
        **kwargs: as SequenceModel.
    """

    def __init__(
        self,
        spec: DataSpec,
        hidden_size: PositiveInt = 128,
        memory_steps: Annotated[int, Range(3)] | None = None,
        **kwargs: Any,
    ):
        super().__init__(spec, hidden_size, **kwargs)
        self.cell = LSTMCell(spec.sequence_shape[1], hidden_size, memory_steps)


class StackedLSTMModel(SequenceModel):
    """A StackedLSTM over the whole sequence.

    Args:
        spec, hidden_size: as SequenceModel.
        num_layers: LSTM layers, each of `hidden_size` units.
        dropout: the probability of dropping a value between two layers.
        memory_steps: as LSTMCellModel.
        **kwargs: as SequenceModel.
    """

    def __init__(
        self,
        spec: DataSpec,
        hidden_size: PositiveInt = 128,
        num_layers: PositiveInt = 2,
        dropout: Fraction = 0.5,
        memory_steps: Annotated[int, Range(3)] | None = None,
        **kwargs: Any,
    ):
        super().__init__(spec, hidden_size, **kwargs)
        features = spec.sequence_shape[1]
        self.lstm = StackedLSTM(num_layers, features, hidden_size, dropout, self.backend, memory_steps)

    @override
    def unroll(self, x: Tensor) -> Tensor:
        """Run the recurrent network: `x: (B, T, F)` → the last layer's hidden states `(B, T, H)`."""
        return self.lstm(x)[0]

    def unread_options(self) -> dict[str, str]:
        """Return the options that change nothing in this network, and why."""
        return {"dropout": "it is between layers, and there is one"} if len(self.lstm.cells) == 1 else {}
