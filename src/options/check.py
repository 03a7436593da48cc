"""Turn a composed configuration into plain, checked containers, or into one line that says what is wrong with it.

Nothing is imported: the parameters of a node's target are read from its source text.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig

from ..errors import UserError
from . import trust
from .groups import COLLECTIONS, GROUPS, OPTIONAL_GROUPS, SECTIONS, choices_of, nodes_of_configs, to_plain
from .habits import answer_to
from .hints import no_such_option, resolving
from .purpose import EXPERIMENT_OPTIONS, TASK_OPTIONS, TOP_LEVEL, annotation_of, lightning_module_of, signature_at
from .ranks import ranks_asked
from .signatures import class_attribute, inherits, is_installed, signature_of
from .tree import HYDRA_KEYS, TARGET, flatten, walk
from .values import check_value

# The interpolations by which YAML files of other projects name the run's folder.
_RUN_DIR = re.compile(r"\$\{(run_dir|hydra:runtime\.output_dir)\}")
# An environment variable that holds a secret: COMET_API_KEY or HFTOKEN, and not TOKENIZER_DIR, MAX_TOKENS or MONKEY_DIR.
_SECRET = re.compile(
    r"\$\{\s*oc\.env:[^,}]*(((?<![A-Z])|API|ACCESS|SECRET)KEYS?|TOKEN|SECRETS?|PASSWORDS?)(?![A-Z])", re.IGNORECASE
)
# Options of the Trainer that the program sets itself, each with what to write instead.
_SET_BY_PROGRAM = {
    "logger": "logger=… takes the loggers, and logger=none leaves them out",
    "callbacks": "'+callbacks.NAME={_target_: …}' adds one",
    "default_root_dir": "hydra.run.dir=… moves the whole run",
}
# Callbacks of Lightning that a new run refuses, each with the reason and what to write instead.
_REFUSED_CALLBACKS = {
    "lightning.pytorch.callbacks.batch_size_finder.BatchSizeFinder": "takes its trial steps from the learning-rate "
    "schedule; write batchscope train experiment=find_batch_size …",
    "lightning.pytorch.callbacks.gradient_accumulation_scheduler.GradientAccumulationScheduler": "changes how many batches "
    "an update takes, and the run is planned for one number; write trainer.accumulate_grad_batches=…",
    "lightning.pytorch.callbacks.stochastic_weight_avg.StochasticWeightAveraging": "hands its average over after the last "
    "checkpoint, so that none has it; write callbacks=weight_averaging",
}


def check_config(config: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Check a composed configuration; return a copy in plain containers, with its interpolations resolved.

    The copy for a LightningModule lacks the sections that only a Task reads. Raises UserError for an option that is
    unknown, of the wrong kind or out of range, and for a model that cannot read the data.
    """
    plain = to_plain(config) if isinstance(config, DictConfig) else copy.deepcopy(config)
    if missing := sorted(name for name, value in flatten(plain) if value == "???"):
        experiment = EXPERIMENT_OPTIONS.get(missing[0])
        needed_by = f", which experiment={experiment} needs" if experiment else ""
        raise UserError(f"{missing[0]}: has no value; write {missing[0]}=…{needed_by}")
    for name, value in walk(plain):
        if isinstance(value, str) and _RUN_DIR.search(value):
            raise UserError(
                f"{name}: got {value!r}, and the run's folder is no option; leave it out of TensorBoard, CSV and W&B, which get "
                "it, and read trainer.default_root_dir in a callback"
            )
        if isinstance(value, str) and "${hydra:" in value:
            raise UserError(f"{name}: got {value!r}, which is known to Hydra alone; write the value itself")
        if isinstance(value, str) and _SECRET.search(value):
            raise UserError(
                f"{name}: got {value!r}, which would be kept in run.json and in checkpoints; leave it out: the library reads its "
                "own variable"
            )
    with resolving("config"):
        plain = to_plain(config, resolve=True) if isinstance(config, DictConfig) else plain
    if "script" in plain:
        raise UserError(
            f"script: the run is one of {plain['script']}, with options of its own: batchscope run starts it again"
        )
    _check_top_level(plain)
    if lightning_module_of(plain):
        plain = {key: value for key, value in plain.items() if key not in TASK_OPTIONS}
    for section in SECTIONS:
        if section in TASK_OPTIONS and section not in plain:
            continue
        if not isinstance(plain.get(section), dict):
            shown = "null" if plain.get(section) is None else repr(plain[section])
            raise UserError(f"{section}: got {shown}, takes {', '.join(choices_of(section))}")
        if plain[section].get(TARGET) is None:
            raise UserError(f"{section}._target_: is missing; it names the class to build")
        check_node(plain[section], section)
    data = signature_of(plain["data"][TARGET])  # one without a batch_size makes its own batches
    if "batch_size" not in plain["data"] and data and "batch_size" in data.parameters:
        raise UserError("data.batch_size: is missing")
    for collection in COLLECTIONS:
        plain.setdefault(collection, None)
        _check_collection(plain[collection] or {}, collection)
    if plain["search"] is not None:
        plain["search"] = {TARGET: "batchscope.sweep.grow_batch.BatchSizeSearch", **plain["search"]}
        _check_search(plain["search"])
    for name, value in walk(plain):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}: got {value!r}, takes finite numbers")  # a record holds no others
    trust.copy_plain(plain)  # refuse here what the run's record could not hold
    _check_model_fits_data(plain["model"], plain["data"])
    _check_combinations(plain)
    return plain


def refuse_callbacks(config: dict[str, Any]) -> None:
    """Raise UserError for a callback that a new run refuses; a recorded run that has one can be read and resumed."""
    for name, node in (config["callbacks"] or {}).items():
        if node:
            refuse_kinds(f"callbacks.{name}", partial(inherits, node[TARGET]))


def refuse_kinds(option: str, is_subclass: Callable[[str], bool]) -> None:
    """Raise UserError for a callback that a new run refuses; `is_subclass` compares its class with a full class name."""
    for class_name, instead in _REFUSED_CALLBACKS.items():
        if is_subclass(class_name):
            raise UserError(f"{option}: {class_name.rpartition('.')[2]} {instead}")


def _check_top_level(plain: dict[str, Any]) -> None:
    for key in TOP_LEVEL:
        # A network without Task options is refused when it is built.
        if key not in (*plain, *EXPERIMENT_OPTIONS, *TASK_OPTIONS):
            raise UserError(f"{key}: is missing")
    for key, value in plain.items():
        if key in TOP_LEVEL:
            check_value(key, value, TOP_LEVEL[key])
        elif key in OPTIONAL_GROUPS:
            raise UserError(f"{key}: is no section; its YAML file begins with the line `# @package _global_`")
        elif key not in SECTIONS + COLLECTIONS:
            raise no_such_option(key, value, [*GROUPS, *TOP_LEVEL], "", plain)


def _check_search(search: dict[str, Any]) -> None:
    """Raise UserError for a search that the configs do not name: the sweep has to know what a search asks for."""
    targets = [node[TARGET] for node in nodes_of_configs().get("search", ()) if TARGET in node]
    if search[TARGET] not in targets:
        raise UserError(f"search.{TARGET}: got {search[TARGET]!r}, takes {' or '.join(targets)}")
    check_node(search, "search")


def _check_combinations(config: dict[str, Any]) -> None:
    """Refuse options that do not go together."""
    mode, trainer, module = config["compile"], config["trainer"], lightning_module_of(config)
    accumulates = trainer.get("accumulate_grad_batches", 1) > 1
    uses_graphs = mode in ("reduce-overhead", "max-autotune")
    for option, instead in _SET_BY_PROGRAM.items():
        if trainer.get(option) is not None:
            raise UserError(f"trainer.{option}: takes null; {instead}")
    if isinstance(trainer.get("val_check_interval"), str | dict) and ranks_asked(config) not in (1, None):
        raise UserError(
            "trainer.val_check_interval: is a time, and the clocks of several processes differ; write a number of batches"
        )
    if mode and module:
        raise UserError(f"compile: {module} is a LightningModule, which compiles itself")
    if uses_graphs and accumulates:
        raise UserError(
            f"compile: {mode} uses CUDA graphs, which overwrite accumulated gradients; write compile=default"
        )


def _check_collection(nodes: Any, collection: str) -> None:
    if not isinstance(nodes, dict):
        raise UserError(f"{collection}: got {nodes!r}, takes names, each with a _target_")
    for name, node in nodes.items():
        option = f"{collection}.{name}"
        if node is None:
            continue
        if not isinstance(node, dict) or TARGET not in node:
            value = None if isinstance(node, dict) else str(node)
            instead = None if node is False else answer_to(option, value)  # `false` asks for no choice
            raise UserError(f"{option}: {instead or f'got {node!r}, takes null or a node with a _target_'}")
        if str(node[TARGET]).endswith(".WandbLogger") and not is_installed("wandb"):
            raise UserError(f"{option}: wandb is not installed; pip install 'batchscope[wandb]'")
    check_node(nodes, collection)


def check_node(node: Any, path: str) -> None:
    """Raise UserError for the first option under `node` that its target does not take; `path` is its full name.

    Options that the configs set for another class are deleted: after `model._target_=…` those of the default model go.
    Nodes in lists and dicts are checked at any depth. A target whose source text cannot be read takes any option.
    """
    if isinstance(node, list):
        for index, child in enumerate(node):
            check_node(child, f"{path}.{index}")
    if not isinstance(node, dict):
        return
    target, signature = node.get(TARGET), None
    if TARGET in node:
        if not isinstance(target, str) or "." not in target.strip("."):
            takes = "the full name of a class or function: package.module.Name"
            raise UserError(f"{path}.{TARGET}: got {target!r}, takes {takes}")
        signature = signature_at(path, target)
    for key, value in [*node.items()]:
        option = f"{path}.{key}"
        if isinstance(key, str) and key.startswith("_") and key.endswith("_"):
            if key not in HYDRA_KEYS:
                keys = ", ".join(HYDRA_KEYS)
                raise UserError(f"{option}: no such option; the keys with underscores that Hydra reads are {keys}")
        elif signature is not None:
            if key not in signature.parameters and not (signature.takes_any and isinstance(key, str)):
                if _belongs_to_other_class(path, key, value, target):
                    del node[key]
                    continue
                raise no_such_option(option, value, signature.parameters, path, {path: node})
            check_value(option, value, annotation_of(option, target))
        check_node(value, option)


def _belongs_to_other_class(path: str, key: str, value: Any, target: Any) -> bool:
    """Whether the configs give this option, at `path` and for other classes alone, this value (any value for None)."""
    config_nodes = [node for node in nodes_of_configs().get(path, ()) if key in node]
    if any(node.get(TARGET) == target for node in config_nodes):
        return False
    return any(value in (None, node[key]) or "${" in str(node[key]) for node in config_nodes)


def refuse_untaken(option: str, config: Mapping[str, Any]) -> None:
    """Raise UserError for a typed option that the class of its node does not take, and that `check_node` has deleted."""
    path, _, name = option.rpartition(".")
    node: Any = config
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping):
        return
    signature = signature_at(path, node.get(TARGET))
    if signature and not signature.takes_any and name not in (*signature.parameters, *HYDRA_KEYS):
        raise no_such_option(option, node.get(name), signature.parameters, path, {path: node})


def _check_model_fits_data(model: dict[str, Any], data: dict[str, Any]) -> None:
    """Refuse a model that cannot read the kind of data; the classes declare `accepts` and `kind`."""
    kind = class_attribute(data["_target_"], "kind")
    accepts = class_attribute(model["_target_"], "accepts")
    accepts = (accepts,) if isinstance(accepts, str) else accepts
    if kind and accepts and kind not in accepts:
        name, served = model["_target_"].rpartition(".")[2], data["_target_"].rpartition(".")[2]
        raise UserError(
            f"model: {name} reads {' or '.join(accepts)} data, and {served} serves {kind} data; write another model=… or data=…"
        )
