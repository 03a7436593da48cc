"""Datasets, what they say of themselves, and the loader that they share."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .adding import Adding as Adding
    from .augment import Augment as Augment
    from .base import DataModule as DataModule
    from .cifar10 import CIFAR10 as CIFAR10
    from .copy_memory import CopyMemory as CopyMemory
    from .datamodule import TensorDataModule as TensorDataModule
    from .digits import Digits as Digits
    from .mnist import MNIST as MNIST
    from .mnist import FashionMNIST as FashionMNIST
    from .sequential_mnist import SequentialMNIST as SequentialMNIST
    from .spec import DataSpec as DataSpec
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
