"""How much a batch of any type holds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def samples_in(batch: Any) -> int:
    """The length of the first tensor found in a batch, depth first; 0 where there is none.

    Takes what Lightning takes: tensors, and tuples, lists, dicts and dataclasses of them, nested in any way.
    """
    first = _first_tensor(batch)
    if first is None:
        return 0
    return len(first) if first.dim() else 1


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        children = batch.values()
    elif isinstance(batch, tuple | list):
        children = batch
    elif dataclasses.is_dataclass(batch):
        children = vars(batch).values()
    else:  # a graph of PyG, for one, keeps its tensors as attributes
        children = [getattr(batch, "x", None)] if hasattr(batch, "x") else []
    return next((found for child in children if (found := _first_tensor(child)) is not None), None)
