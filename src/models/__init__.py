"""Plain PyTorch networks; they know nothing of Lightning or Hydra."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .cnn import SimpleCNN as SimpleCNN
    from .mlp import MLP as MLP
    from .recurrent import LSTMCell as LSTMCell
    from .recurrent import RNNCell as RNNCell
    from .recurrent import StackedLSTM as StackedLSTM
    from .recurrent import unroll as unroll
    from .sequence import LSTMCellModel as LSTMCellModel
    from .sequence import RNNCellModel as RNNCellModel
    from .sequence import StackedLSTMModel as StackedLSTMModel
    from .torchvision import TorchvisionModel as TorchvisionModel
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
