"""What a node of a configuration may build, and which options it may have."""

from dataclasses import dataclass
from typing import Any

from ..errors import UserError, did_you_mean
from .purpose import TRUSTED_PACKAGES, annotation_of
from .renamed import TARGETS, refuse_old_name
from .signatures import ancestors, locate, signature_of
from .values import check_value

_TARGET = "_target_"


@dataclass(frozen=True)
class Role:
    """What a node may build: a class of one of the packages that is `base` or inherits from it."""

    base: str
    packages: tuple[str, ...]


def role_of(path: str) -> Role | None:
    """What the node at a path may build; None if it may build nothing."""
    lightning = (*TRUSTED_PACKAGES, "lightning")
    roles = {  # `*` is any one name
        "model": Role("torch.nn.Module", TRUSTED_PACKAGES),
        "data": Role("lightning.pytorch.core.datamodule.LightningDataModule", TRUSTED_PACKAGES),
        "optimizer": Role("batchscope.training.optimizer.Optimizer", TRUSTED_PACKAGES),
        "search": Role("batchscope.sweep.search.Search", TRUSTED_PACKAGES),
        "trainer": Role("lightning.pytorch.trainer.trainer.Trainer", lightning),
        "trainer.strategy": Role("lightning.pytorch.strategies.strategy.Strategy", lightning),
        "trainer.profiler": Role("lightning.pytorch.profilers.profiler.Profiler", lightning),
        "callbacks.*": Role("lightning.pytorch.callbacks.callback.Callback", lightning),
        "logger.*": Role("lightning.fabric.loggers.logger.Logger", lightning),
    }
    section, *names = path.split(".")
    return roles.get(path) or (roles.get(f"{section}.*") if len(names) == 1 else None)


def check_node(node: Any, path: str) -> None:
    """Raise UserError for the first option under `node` that its target does not take; `path` is its full name.

    A `_target_` is checked wherever it stands: in lists, in dicts, at any depth. Hydra's other keys (`_args_`, …) are
    refused: they change what is called and with what.
    """
    if isinstance(node, list):
        for index, child in enumerate(node):
            check_node(child, f"{path}.{index}")
    if not isinstance(node, dict):
        return
    target = node.get(_TARGET)
    if _TARGET in node:
        check_target(target, path)
    for key, value in node.items():
        name = f"{path}.{key}" if path else str(key)
        if key == _TARGET:
            continue
        if isinstance(key, str) and key.startswith("_") and key.endswith("_"):
            raise UserError(f"{name}: no such option; of the keys with underscores around them, only _target_ is taken")
        if _TARGET in node:
            _check_option(name, key, value, node, path)
        check_node(value, name)


def _check_option(name: str, key: Any, value: Any, node: dict[str, Any], path: str) -> None:
    signature = signature_of(node[_TARGET])
    if signature is None:
        return
    if key not in signature.parameters and not (signature.open and isinstance(key, str)):
        names = [key for key in node if key in signature.parameters]
        takes = f" {path} takes {', '.join(names)}." if 0 < len(names) <= 12 else ""
        raise UserError(f"{name}: no such option.{did_you_mean(str(key), signature.parameters)}{takes}")
    check_value(name, value, annotation_of(name, node[_TARGET]))


def check_target(target: Any, path: str) -> None:
    """Raise UserError unless the target is, by its source text, a public class of the kind that `path` builds."""
    role = role_of(path)
    if role is None:
        raise UserError(f"{path}.{_TARGET}: got {target!r}, and nothing is built here")
    packages = tuple(f"{package}." for package in role.packages)
    found = locate(target) if isinstance(target, str) and target.startswith(packages) else None
    public = found is not None and not any(part.startswith("_") for part in target.split("."))
    if found is None or not public or not found[0].name.startswith(packages) or role.base not in ancestors(found):
        refuse_old_name(f"{path}.{_TARGET}", target, TARGETS)
        kind, allowed = role.base.rpartition(".")[2], " or ".join(role.packages)
        raise UserError(f"{path}.{_TARGET}: got {target!r}, takes a {kind} class of {allowed}")
