"""How an option is declared, and what it is for.

Resuming asks here whether an option may change, reports whether it divides groups of runs, ranks whether it may differ
between machines, and trust whether a file may set it. Nothing here needs Hydra or OmegaConf.
"""

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Annotated, Any, Literal

from .signatures import Signature, class_attribute, inherits, lacks, signature_of
from .trainer import CALLBACK, LOGGER, OBSERVERS, TRAINER
from .tree import flatten
from .types import Choice, Purpose, Range, Seed, Where
from .values import alternatives

PATH_PURPOSES = (Purpose.READ_FROM, Purpose.WRITTEN_TO)
# Options for these purposes are left out of tables and of HPARAMS, and do not divide groups of runs.
NON_FACTOR_PURPOSES = (*PATH_PURPOSES, Purpose.SEARCH, Purpose.OBSERVATION)
_CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
TOP_LEVEL: dict[str, Any] = {
    "seed": Seed,
    "test": Annotated[bool, Purpose.OBSERVATION],
    "timing": Annotated[bool | Literal["auto"], Purpose.OBSERVATION],
    "enough": Annotated[float, Range(0, 1, open_low=True), Purpose.OBSERVATION],
    "margin": Annotated[Annotated[float, Range(0, 1, open_low=True)] | None, Purpose.OBSERVATION],
    "optimized_metric": Annotated[str | None, Purpose.OBSERVATION],
    "channels_last": bool,
    "compile": Annotated[bool | _CompileMode, Purpose.SPEED],
    "tags": Annotated[list[str], Purpose.OBSERVATION],
    "search": Annotated[dict | None, Purpose.SEARCH],
    "target": Annotated[float | None, Purpose.LENGTH],
    "target_metric": Annotated[Choice | None, Purpose.LENGTH],
    "init": str | None,
    "resume": Annotated[str | None, Purpose.READ_FROM],
}
OWN_RATE = r"model\.(.+\.)?(lr|learning_rate)"  # a pattern: the option of a LightningModule's learning rate
# These do not change the time of a step, nor do the learning rate's schedule and the options of Purpose.LENGTH.
_SPEED_NEUTRAL = ("seed", "init", "optimizer.lr")
# Options of the report alone: runs that differ in them are the same training.
REPORT_OPTIONS = ("timing", "enough", "margin")
EXPERIMENT_OPTIONS = {
    "target": "time_to_target",
    "target_metric": "time_to_target",
}  # option → the experiment that has it
# Parameters that the program passes itself, so that they are no options.
_PROGRAM_PARAMETERS = {
    "model": ("spec",),
    "task": ("model", "spec", "optimizer", "channels_last", "compile_mode"),
    "optimizer": ("params", "make"),
}
_PACKAGE = __name__.partition(".")[0]
_TABLES = {"trainer": TRAINER, "callbacks": CALLBACK, "logger": LOGGER}
# What only a Task reads, and what a LightningModule has in its place.
TASK_OPTIONS = {"task": "its own loss and metrics", "optimizer": "its own optimizer", "channels_last": "its own layout"}
_FREEZES = "whose layers no Task freezes; write callbacks=my_finetuning, a BaseFinetuning as in docs/own-project.md"
_LIGHTNING_MODULE = "lightning.pytorch.core.module.LightningModule"


NO_END = 10**9  # training steps: not -1, because a schedule needs a number
# The lengths of a timed run, as overrides: after the typed ones, they let it train until its speed is known.
ENDLESS = {"trainer.max_epochs": "-1", "trainer.max_steps": str(NO_END), "trainer.max_time": "null"}


def timed_experiment(names: Sequence[str]) -> str:
    """Return the override that makes runs timed: experiment=throughput in addition to these experiments."""
    return f"experiment=[{','.join([*names, 'throughput'])}]" if names else "experiment=throughput"


def annotation_of(option: str, target: Any) -> Any:
    """Return the annotation of an option (`data.batch_size`) of a node with this `_target_`; None if it cannot be read.

    Options of Lightning's classes are declared in a table, others in the constructor that takes them.
    """
    section, *above, name = option.split(".")
    if _is_in_table(section, above, name):
        return _TABLES[section][name]
    signature = signature_at(".".join([section, *above]), target)
    return signature.parameters.get(name) if signature else None


def is_ours(option: str, target: Any) -> bool:
    """Whether this package declares an option, in a table for Lightning's classes or in a constructor of its own."""
    section, *above, name = option.split(".")
    if _is_in_table(section, above, name) or (isinstance(target, str) and target.startswith(f"{_PACKAGE}.")):
        return True
    return section == "optimizer" and not above and name in _schedule_parameters()


def _schedule_parameters() -> Mapping[str, Any]:
    """Return the parameters of the learning rate's schedule, which every optimizer takes beside its own."""
    signature = signature_of(f"{_PACKAGE}.training.optimizer.Optimizer")
    return signature.parameters if signature else {}


def _is_in_table(section: str, above: list[str], name: str) -> bool:
    depth = 1 if section in ("callbacks", "logger") else 0
    return len(above) == depth and name in _TABLES.get(section, {})


def signature_at(path: str, target: Any) -> Signature | None:
    """Return the options that a node at `path` (`task`, `callbacks.curves`) takes; None if they cannot be read."""
    signature = signature_of(target) if isinstance(target, str) else None
    if signature is None or path not in _PROGRAM_PARAMETERS:
        return signature
    schedule = signature_of(f"{_PACKAGE}.training.optimizer.Optimizer") if path == "optimizer" else None
    parameters = {**signature.parameters, **(schedule.parameters if schedule else {})}
    defaults = {**signature.defaults, **(schedule.defaults if schedule else {})}
    options = {name: annotation for name, annotation in parameters.items() if name not in _PROGRAM_PARAMETERS[path]}
    return Signature(options, signature.takes_any, defaults)


def marks(annotation: Any) -> set[Any]:
    """Return the metadata of every `Annotated` in an annotation: purposes, ranges, and what a text can do."""
    return {mark for _, marks in alternatives(annotation) for mark in marks}


def purpose_of(option: str, config: Mapping[str, Any]) -> Purpose:
    """Return what an option, by its full name, is for; `Purpose.RESULT` where nothing declares it."""
    section, *names = option.split(".")
    if not names or section in TOP_LEVEL:
        return Purpose.OBSERVATION if section == "logger" else _declared_purpose(TOP_LEVEL.get(section))
    above = f"{section}.{names.pop(0)}" if section in ("callbacks", "logger") else section
    target = _value_at(config, f"{above}._target_")
    paths = [".".join([above, *names[:depth]]) for depth in range(len(names) + 1)]
    annotations = (annotation_of(child, _value_at(config, f"{node}._target_")) for node, child in pairwise(paths))
    purposes = map(_declared_purpose, annotations)  # the outermost node's first
    declared = next((purpose for purpose in purposes if purpose is not Purpose.RESULT), Purpose.RESULT)
    if section == "logger" or (section == "callbacks" and only_observes(target)):
        return declared if declared in PATH_PURPOSES else Purpose.OBSERVATION
    return declared


def changes_speed(option: str, config: Mapping[str, Any]) -> bool:
    """Whether the value of an option may change the time of a step; True unless something says otherwise."""
    section, _, name = option.partition(".")
    sets_rate = section == "optimizer" and name in _schedule_parameters()
    is_own_rate = "optimizer" not in config and re.fullmatch(OWN_RATE, option)  # of a LightningModule
    return not (option in _SPEED_NEUTRAL or sets_rate or is_own_rate or purpose_of(option, config) is Purpose.LENGTH)


def with_speed_of(config: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with those options of another one that change only the speed."""

    def merge(node: Any, source: Any, path: str) -> Any:
        if path and purpose_of(path, config) is Purpose.SPEED:
            return source
        if not isinstance(node, dict) or not isinstance(source, dict):
            return node
        return {key: merge(value, source.get(key, value), f"{path}.{key}".lstrip(".")) for key, value in node.items()}

    return merge(config, other, "")


def only_observes(target: Any) -> bool:
    """Whether a callback leaves training as it is: its class says `observes_only = True`, or it is in OBSERVERS."""
    return isinstance(target, str) and (target in OBSERVERS or class_attribute(target, "observes_only") is True)


def lightning_module_of(config: Mapping[str, Any]) -> str:
    """Return the class name of the model if its source text says that it is a LightningModule, else an empty text."""
    target = _value_at(config, "model._target_")
    is_foreign = isinstance(target, str) and not target.startswith(f"{_PACKAGE}.")
    return target.rpartition(".")[2] if is_foreign and inherits(target, _LIGHTNING_MODULE) else ""


def why_no_validation(config: Mapping[str, Any]) -> str:
    """Return why the run of a configuration has no validation; empty if it has one, or if that cannot be read."""
    if _value_at(config, "trainer.limit_val_batches") == 0:
        return "trainer.limit_val_batches=0 leaves out the validation"
    methods = {"data": "val_dataloader"} | ({"model": "validation_step"} if lightning_module_of(config) else {})
    for section, method in methods.items():
        target = _value_at(config, f"{section}._target_")
        if isinstance(target, str) and lacks(target, method):
            return f"{target.rpartition('.')[2]} has no {method}"
    return ""


def learning_rate_option(config: Mapping[str, Any]) -> str | None:
    """Return the full name of the option of a LightningModule's learning rate; None where it takes none.

    The option has one of the names that Lightning's LearningRateFinder looks for, and may be that of a nested node.
    """
    node = config["model"]
    signature, names = signature_at("model", node["_target_"]), [name for name, _ in flatten(node)]
    for name in ("lr", "learning_rate"):
        for option in (*(signature.parameters if signature else ()), *names):
            if option.rpartition(".")[2] == name:
                return f"model.{option}"
    return None


def why_unread(option: str, config: Mapping[str, Any]) -> str:
    """Return why the run of a checked configuration does not read an option; empty if it does, or if that is unknown."""
    if (module := lightning_module_of(config)) and (why := why_module_ignores(module, option, config)):
        return why
    condition = _read_condition(option, config)
    value = _effective_value(config, condition.option) if condition else None
    if condition is None or value in (None, *condition.values) or config.get("search"):  # a search may try other values
        return ""
    is_timed = bool(_value_at(config, "callbacks.until_known"))
    if is_timed and condition.option.startswith("optimizer."):  # a timed run has another schedule
        return ""
    takes = " or ".join(str(choice).lower() for choice in condition.values)
    return f"has no effect with {condition.option}={str(value).lower()}, only with {takes}"


def why_module_ignores(module: str, option: str, config: Mapping[str, Any]) -> str:
    """Return why a LightningModule of this class does not read an option; empty for an option that not only a Task reads."""
    section = option.partition(".")[0]
    if section not in TASK_OPTIONS:
        return ""
    rate = learning_rate_option(config) if section == "optimizer" else None
    reason = _FREEZES if option == "task.freeze" else f"which has {TASK_OPTIONS[section]}"
    return f"{module} is a LightningModule, {reason}{f'; its rate is {rate}' if rate else ''}"


def _read_condition(option: str, config: Mapping[str, Any]) -> Where | None:
    """Return the condition under which an option is read; None if it is always read."""
    path, dot, _ = option.rpartition(".")
    declared = marks(annotation_of(option, _value_at(config, f"{path}._target_"))) if dot else ()
    return next((mark for mark in declared if isinstance(mark, Where)), None)


def _effective_value(config: Mapping[str, Any], option: str) -> Any:
    """Return the value of an option in a configuration, else the default of its class; None if neither is known."""
    path, _, name = option.rpartition(".")
    node = _value_at(config, path) if path else config
    is_set = not isinstance(node, Mapping) or name in node
    return _value_at(config, option) if is_set else default_of(option, config)


def default_of(option: str, config: Mapping[str, Any]) -> Any:
    """Return the default of an option in the class of its node; None if it is not known."""
    path, _, name = option.rpartition(".")
    signature = signature_at(path, _value_at(config, f"{path}._target_"))
    return signature.defaults.get(name) if signature else None


def _value_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a configuration; None if there is none."""
    return reduce(lambda node, name: node.get(name) if isinstance(node, Mapping) else None, path.split("."), config)


def _declared_purpose(annotation: Any) -> Purpose:
    return next((mark for mark in marks(annotation) if isinstance(mark, Purpose)), Purpose.RESULT)
