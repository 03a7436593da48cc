"""What a module accumulates beside its weights: attributes such as a list of losses, and the states of its torchmetrics.

Lightning keeps none of it, and a hook at the end of an epoch reads it.
"""

from collections import deque
from collections.abc import Collection
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

_LIGHTNINGS = vars(LightningModule()).keys()
_CPU = torch.device("cpu")


class ModuleState:
    """The attributes of a module and of its metrics that a training changes: numbers, tensors, and lists and dicts of these.

    A file that sets them shall name no path: attributes with texts are left out. Made before the first step.
    """

    def __init__(self, module: LightningModule):
        self._module = module
        self._before = {
            name: {key: _marks(value) for key, value in vars(part).items() if _is_own(key, value)}
            for name, part in _parts(module)
        }

    def kept(self, without: Collection[Metric] = ()) -> dict[str, dict[str, tuple[Any, bool]]]:
        """By the name of a part and of its attribute: the value on the CPU, and whether it has tensors on another device."""
        for part in self._module.modules():
            if isinstance(part, MetricCollection):
                part.values()  # of metrics that share a state only the first is up to date before
        found: dict[str, dict[str, tuple[Any, bool]]] = {}
        for name, part in _parts(self._module):
            if not any(part is each for each in without):
                before = self._before.get(name, {})
                found[name] = {
                    key: (
                        _plain(value, _CPU),
                        any(isinstance(one, Tensor) and not one.is_cpu for one in tree_leaves(value)),
                    )
                    for key, value in vars(part).items()
                    if _is_own(key, value) and not _is_same(_marks(value), before.get(key))
                }
        return found


def restore_module_state(module: LightningModule, kept: dict[str, dict[str, tuple[Any, bool]]]) -> None:
    """Set the attributes to what `ModuleState.kept` had; ValueError for anything else."""
    for name, part in _parts(module):
        for key, (value, is_on_device) in kept.get(name, {}).items():
            if not _is_plain(value):
                raise ValueError("loop_state.module holds something else than numbers and tensors")
            old = vars(part).get(key)
            if not _is_own(key, old) or (key not in vars(part) and hasattr(part, key)):
                continue  # it is a layer, a method or a text of this module
            value = _plain(value, module.device if is_on_device else _CPU)
            if isinstance(old, dict | list | deque) and isinstance(value, dict | list):
                old.clear()  # others may have it, too, and it may be of a class such as defaultdict
                (old.update if isinstance(old, dict) else old.extend)(value)
            else:
                vars(part)[key] = value


def _parts(module: LightningModule) -> list[tuple[str, nn.Module]]:
    return [("", module), *((name, part) for name, part in module.named_modules() if isinstance(part, Metric))]


def _marks(value: Any) -> list[tuple[Any, int | None]]:
    """By which a change is seen: the leaves, and how often each tensor was changed in place."""
    return [
        (one, one._version if isinstance(one, Tensor) and not one.is_inference() else None)
        for one in tree_leaves(value)
    ]


def _is_same(marks: list[tuple[Any, int | None]], before: list[tuple[Any, int | None]] | None) -> bool:
    if before is None or len(marks) != len(before):
        return False
    return all(one is other and count == known for (one, count), (other, known) in zip(marks, before, strict=True))


def _is_own(name: str, value: Any) -> bool:
    return name not in _LIGHTNINGS and _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether a value holds nothing but numbers, and dense tensors that no optimizer trains."""
    if isinstance(value, dict):
        return all(type(key) in (str, int) and _is_plain(value[key]) for key in value)
    if type(value) in (list, tuple, deque):
        return all(map(_is_plain, value))
    if type(value) is Tensor:
        is_dense = value.layout == torch.strided and not value.is_quantized and not value.is_meta
        return is_dense and not (value.is_leaf and value.requires_grad)
    return value is None or type(value) in (bool, int, float)


def _plain(value: Any, device: torch.device) -> Any:
    """A copy in plain containers, with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _plain(one, device) for key, one in value.items()}
    if isinstance(value, list | deque):
        return [_plain(one, device) for one in value]
    return tuple(_plain(one, device) for one in value) if isinstance(value, tuple) else value
