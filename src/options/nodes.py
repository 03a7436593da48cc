"""What a node of a configuration may build, and which options it may have."""

from dataclasses import dataclass
from typing import Any

from ..errors import UserError, did_you_mean
from . import packages
from .habits import habit
from .purpose import annotation_of
from .renamed import TARGETS, refuse_old_name
from .signatures import ancestors, locate, parameters_of, problem_in, signature_of
from .values import check_value

_TARGET = "_target_"
_DATA = "batchscope.data.base.DataModule"
_AUGMENT = "batchscope.data.augment.Augment"


@dataclass(frozen=True)
class Role:
    """What a node may build: a class of a trusted package, or of Lightning, that is `base` or inherits from it."""

    base: str
    of_lightning: bool = False

    def allows(self, name: str) -> bool:
        """Whether a dotted name lies in a package whose classes may be built here."""
        return (self.of_lightning and name.startswith("lightning.")) or packages.trusts(name)


def role_of(path: str) -> Role | None:
    """What the node at a path may build; None if it may build nothing."""
    roles = {  # `*` is any one name
        "model": Role("torch.nn.Module"),
        "data": Role("lightning.pytorch.core.datamodule.LightningDataModule"),
        "data.augment": Role(_AUGMENT),
        "optimizer": Role("batchscope.training.optimizer.Optimizer"),
        "search": Role("batchscope.sweep.search.Search"),
        "trainer": Role("lightning.pytorch.trainer.trainer.Trainer", of_lightning=True),
        "trainer.strategy": Role("lightning.pytorch.strategies.strategy.Strategy", of_lightning=True),
        "trainer.profiler": Role("lightning.pytorch.profilers.profiler.Profiler", of_lightning=True),
        "callbacks.*": Role("lightning.pytorch.callbacks.callback.Callback", of_lightning=True),
        "logger.*": Role("lightning.fabric.loggers.logger.Logger", of_lightning=True),
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
        if known := habit(name, str(value)):
            raise known
        names = [key for key in node if key in signature.parameters]
        takes = f" {path} takes {', '.join(names)}." if 0 < len(names) <= 12 else ""
        raise UserError(f"{name}: no such option.{did_you_mean(str(key), signature.parameters)}{takes}")
    cls = locate(node[_TARGET]) if name == "data.augment" else None
    if cls and _DATA in ancestors(cls):  # in anybody else's class the option may be of any kind
        _check_augment(name, value)
    check_value(name, value, annotation_of(name, node[_TARGET]))


def _check_augment(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, dict) and _TARGET in value):
        options = ", ".join(f"{name}.{option}" for option in parameters_of(_AUGMENT))
        raise UserError(f"{name}: got {value!r}, takes null; its options are {options}")


def check_target(target: Any, path: str) -> None:
    """Raise UserError unless the target is, by its source text, a public class of the kind that `path` builds."""
    role = role_of(path)
    if role is None:
        raise UserError(f"{path}.{_TARGET}: got {target!r}, and nothing is built here")
    if isinstance(target, str) and role.allows(target) and _is_class_of(target, role):
        return
    option, package = f"{path}.{_TARGET}", target.partition(".")[0] if isinstance(target, str) else ""
    refuse_old_name(option, target, TARGETS)
    allowed = ["batchscope", *(["lightning"] if role.of_lightning else [])]
    hint = ""
    if package not in allowed and packages.trusts(f"{package}."):
        if problem := problem_in(package):
            raise UserError(f"{option}: {target} cannot be read: {problem}")
        allowed.append(package)
    elif packages.may_be_own(package):
        hint = f"; if {package} is a package of your own, write trust={package}"
    kind = role.base.rpartition(".")[2]
    raise UserError(f"{option}: got {target!r}, takes a {kind} class of {' or '.join(allowed)}{hint}")


def _is_class_of(target: str, role: Role) -> bool:
    """Whether a target is, by its source text, a public class of the role's base, defined in a package that is allowed."""
    try:
        found = None if any(part.startswith("_") for part in target.split(".")) else locate(target)
        return found is not None and role.allows(f"{found[0].name}.") and role.base in ancestors(found)
    except RecursionError:  # modules that import a name from each other in a circle, or a class that is its own base
        return False
