"""Optimizers as the configs of `optimizer=` build them."""

from functools import partial
from typing import Any

import torch

from batchscope.training.optimizer import Optimizer


def sgd(**options: Any) -> Optimizer:
    """SGD with Nesterov momentum at a constant rate of 0.1, unless the options say otherwise."""
    return Optimizer(partial(torch.optim.SGD, momentum=0.9, nesterov=True), **{"lr": 0.1, **options})


def adamw(**options: Any) -> Optimizer:
    """Fused AdamW."""
    return Optimizer(partial(torch.optim.AdamW, fused=True), **{"lr": 4e-3, **options})
