"""How an option is declared, and what it is for: the one place for every part that treats options differently.

Resuming asks whether an option may change, reports whether it divides groups of runs, ranks whether it may differ
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

PLACES = (Purpose.READ_FROM, Purpose.WRITTEN_TO)
CHOOSES_NOTHING = (
    *PLACES,
    Purpose.SEARCH,
    Purpose.OBSERVATION,
)  # left out of tables, of HPARAMS, and of what divides groups of runs
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
# Without influence on the time of a step, as the learning rate's schedule and all lengths are.
OWN_RATE = r"model\.(.+\.)?(lr|learning_rate)"  # as a pattern: the learning rate of a LightningModule
_SAME_SPEED = ("seed", "init", "optimizer.lr")
# What a report does with runs: that it differs makes no other run.
OF_REPORTS = ("timing", "enough", "margin")
OF_EXPERIMENTS = {"target": "time_to_target", "target_metric": "time_to_target"}  # that only these experiments have
# Parameters that the program gives, so that they are no options.
_GIVEN = {
    "model": ("spec",),
    "task": ("model", "spec", "optimizer", "channels_last", "compile_mode"),
    "optimizer": ("params", "make"),
}
_PACKAGE = __name__.partition(".")[0]
_TABLES = {"trainer": TRAINER, "callbacks": CALLBACK, "logger": LOGGER}
# What a Task takes for the network that it trains, and what a LightningModule has in its place.
OF_TASK = {"task": "its own loss and metrics", "optimizer": "its own optimizer", "channels_last": "its own layout"}
_FREEZES = "whose layers no Task freezes; write callbacks=my_finetuning, a BaseFinetuning as in docs/own-project.md"
_LIGHTNING_MODULE = "lightning.pytorch.core.module.LightningModule"


NO_END = 10**9  # training steps: a number, by which a schedule can plan
# The lengths of a timed run, as words: behind those that were typed they let it go on until its speed is known.
ENDLESS = {"trainer.max_epochs": "-1", "trainer.max_steps": str(NO_END), "trainer.max_time": "null"}


def timed_experiment(names: Sequence[str]) -> str:
    """The word by which runs are timed: experiment=throughput on top of the experiments of these names."""
    return f"experiment=[{','.join([*names, 'throughput'])}]" if names else "experiment=throughput"


def annotation_of(option: str, target: Any) -> Any:
    """How an option (`data.batch_size`) of a node with this `_target_` is declared; None if that cannot be read.

    That is in a table for Lightning's classes, else in the constructor that takes it.
    """
    section, *above, name = option.split(".")
    if _in_table(section, above, name):
        return _TABLES[section][name]
    signature = signature_at(".".join([section, *above]), target)
    return signature.parameters.get(name) if signature else None


def is_ours(option: str, target: Any) -> bool:
    """Whether this package declares an option: for Lightning's classes in a table, else in a constructor of its own."""
    section, *above, name = option.split(".")
    if _in_table(section, above, name) or (isinstance(target, str) and target.startswith(f"{_PACKAGE}.")):
        return True
    return section == "optimizer" and not above and name in _of_schedule()


def _of_schedule() -> Mapping[str, Any]:
    """What every optimizer takes beside its own options: those of the learning rate's schedule."""
    found = signature_of(f"{_PACKAGE}.training.optimizer.Optimizer")
    return found.parameters if found else {}


def _in_table(section: str, above: list[str], name: str) -> bool:
    depth = 1 if section in ("callbacks", "logger") else 0
    return len(above) == depth and name in _TABLES.get(section, {})


def signature_at(place: str, target: Any) -> Signature | None:
    """The options that a node's `_target_` takes at a place (`task`, `callbacks.curves`); None if it cannot be read."""
    found = signature_of(target) if isinstance(target, str) else None
    if found is None or place not in _GIVEN:
        return found
    schedule = signature_of(f"{_PACKAGE}.training.optimizer.Optimizer") if place == "optimizer" else None
    parameters = {**found.parameters, **(schedule.parameters if schedule else {})}
    defaults = {**found.defaults, **(schedule.defaults if schedule else {})}
    return Signature({k: takes for k, takes in parameters.items() if k not in _GIVEN[place]}, found.open, defaults)


def marks(annotation: Any) -> set[Any]:
    """What `Annotated` says of any kind of value that an annotation takes: purposes and what a text can do."""
    return {mark for _, marks in alternatives(annotation) for mark in marks}


def purpose_of(option: str, config: Mapping[str, Any]) -> Purpose:
    """What an option, by its full name, is for; `Purpose.RESULT` where nothing says it, as in an odd file."""
    section, *names = option.split(".")
    if not names or section in TOP_LEVEL:
        return Purpose.OBSERVATION if section == "logger" else _declared(TOP_LEVEL.get(section))
    above = f"{section}.{names.pop(0)}" if section in ("callbacks", "logger") else section
    target = _at(config, f"{above}._target_")
    places = [".".join([above, *names[:depth]]) for depth in range(len(names) + 1)]
    found = (_declared(annotation_of(part, _at(config, f"{node}._target_"))) for node, part in pairwise(places))
    declared = next((one for one in found if one is not Purpose.RESULT), Purpose.RESULT)  # of the outermost node
    if section == "logger" or (section == "callbacks" and only_observes(target)):
        return declared if declared in PLACES else Purpose.OBSERVATION
    return declared


def changes_speed(option: str, config: Mapping[str, Any]) -> bool:
    """Whether a step may take another time with another value of an option; True unless something says otherwise."""
    section, _, name = option.partition(".")
    sets_rate = section == "optimizer" and name in _of_schedule()
    own_rate = "optimizer" not in config and re.fullmatch(OWN_RATE, option)  # of a LightningModule
    return not (option in _SAME_SPEED or sets_rate or own_rate or purpose_of(option, config) is Purpose.LENGTH)


def with_speed_of(config: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A configuration with those options of another one that change the speed alone."""

    def taken(node: Any, theirs: Any, path: str) -> Any:
        if path and purpose_of(path, config) is Purpose.SPEED:
            return theirs
        if not isinstance(node, dict) or not isinstance(theirs, dict):
            return node
        return {key: taken(value, theirs.get(key, value), f"{path}.{key}".lstrip(".")) for key, value in node.items()}

    return taken(config, other, "")


def only_observes(target: Any) -> bool:
    """Whether a callback leaves training as it is: its class says `observes_only = True`, or it is in OBSERVERS."""
    return isinstance(target, str) and (target in OBSERVERS or class_attribute(target, "observes_only") is True)


def lightning_module_of(config: Mapping[str, Any]) -> str:
    """The class of a configuration's model if its source text says that it is a LightningModule, else an empty text."""
    target = _at(config, "model._target_")
    is_one = isinstance(target, str) and not target.startswith(f"{_PACKAGE}.") and inherits(target, _LIGHTNING_MODULE)
    return target.rpartition(".")[2] if is_one else ""


def why_no_validation(config: Mapping[str, Any]) -> str:
    """Why the run of a configuration has no validation; empty where it has one, or where nobody knows."""
    if _at(config, "trainer.limit_val_batches") == 0:
        return "trainer.limit_val_batches=0 leaves out the validation"
    methods = {"data": "val_dataloader"} | ({"model": "validation_step"} if lightning_module_of(config) else {})
    for section, method in methods.items():
        target = _at(config, f"{section}._target_")
        if isinstance(target, str) and lacks(target, method):
            return f"{target.rpartition('.')[2]} has no {method}"
    return ""


def own_rate(config: Mapping[str, Any]) -> str | None:
    """The option of a LightningModule's learning rate; None where it takes none.

    It has one of the names that Lightning's LearningRateFinder looks for, and may belong to a node within the model.
    """
    node = config["model"]
    signature, given = signature_at("model", node["_target_"]), [name for name, _ in flatten(node)]
    for name in ("lr", "learning_rate"):
        for option in (*(signature.parameters if signature else ()), *given):
            if option.rpartition(".")[2] == name:
                return f"model.{option}"
    return None


def why_unread(option: str, config: Mapping[str, Any]) -> str:
    """Why the run of a checked configuration does not read an option; empty where it does, or where nobody knows."""
    if (module := lightning_module_of(config)) and (why := unread_by(module, option, config)):
        return why
    where = _where(option, config)
    value = _value(config, where.option) if where else None
    if where is None or value is None or value in where.values or config.get("search"):  # which may try other values
        return ""
    is_timed = bool(_at(config, "callbacks.until_known"))
    if is_timed and where.option.startswith("optimizer."):  # which has a schedule of its own
        return ""
    takes = " or ".join(str(choice).lower() for choice in where.values)
    return f"has no effect with {where.option}={str(value).lower()}, only with {takes}"


def unread_by(module: str, option: str, config: Mapping[str, Any]) -> str:
    """Why a LightningModule of this class does not read an option; empty for one that is not of a Task."""
    section = option.partition(".")[0]
    if section not in OF_TASK:
        return ""
    rate = own_rate(config) if section == "optimizer" else None
    has = _FREEZES if option == "task.freeze" else f"which has {OF_TASK[section]}"
    return f"{module} is a LightningModule, {has}{f'; its rate is {rate}' if rate else ''}"


def _where(option: str, config: Mapping[str, Any]) -> Where | None:
    """With which values of another option an option is read; None where it is always."""
    place, dot, _ = option.rpartition(".")
    declared = marks(annotation_of(option, _at(config, f"{place}._target_"))) if dot else ()
    return next((mark for mark in declared if isinstance(mark, Where)), None)


def _value(config: Mapping[str, Any], option: str) -> Any:
    """The value of an option: that of the configuration, or where it has none the default of the class; None if unknown."""
    place, _, name = option.rpartition(".")
    node = _at(config, place) if place else config
    if isinstance(node, Mapping) and name not in node and (found := signature_at(place, node.get("_target_"))):
        return found.defaults.get(name)
    return _at(config, option)


def _at(config: Any, path: str) -> Any:
    """The value at a dotted path of a configuration; None if there is none."""
    return reduce(lambda node, name: node.get(name) if isinstance(node, Mapping) else None, path.split("."), config)


def _declared(annotation: Any) -> Purpose:
    return next((mark for mark in marks(annotation) if isinstance(mark, Purpose)), Purpose.RESULT)
