"""A composed configuration → plain, checked containers, or one line that says what is wrong with it."""

import contextlib
import copy
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import UserError, did_you_mean
from .explain import message_of, no_such_option
from .groups import COLLECTIONS, SECTIONS, choices_of, file_of, known_nodes, load, to_plain, top_level_names
from .habits import answer_to
from .nodes import TARGET, check_node
from .purpose import DEFAULTS, OF_EXPERIMENTS, OF_TASK, TOP_LEVEL, annotation_of, lightning_module_of, signature_at
from .signatures import class_attribute, is_installed, signature_of
from .tree import flatten
from .update import batches_of_update, ranks_asked
from .values import check_value

_OUTPUT_DIR = "${hydra:runtime.output_dir}"  # what Hydra calls the run's folder, in YAML files of other projects


def check_config(config: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Check one composed configuration and return it in plain containers of its own, its interpolations resolved.

    That of a LightningModule has nothing that only a Task reads.

    Raises:
        UserError: for an option that is unknown, of the wrong kind or out of range, and for a model that cannot read
            the data.
    """
    plain = to_plain(config) if isinstance(config, DictConfig) else copy.deepcopy(config)
    if missing := sorted(name for name, value in flatten(plain) if value == "???"):
        asks = f", for which experiment={OF_EXPERIMENTS[missing[0]]} asks" if missing[0] in OF_EXPERIMENTS else ""
        raise UserError(f"{missing[0]}: has no value; write {missing[0]}=…{asks}")
    if isinstance(config, DictConfig) and any(_OUTPUT_DIR in str(value) for _, value in flatten(plain)):
        config = cast(DictConfig, OmegaConf.create(OmegaConf.to_yaml(config).replace(_OUTPUT_DIR, "${run_dir}")))
    try:
        plain = to_plain(config, resolve=True) if isinstance(config, DictConfig) else plain
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {message_of(error)}") from error
    if "script" in plain:
        raise UserError(
            f"script: the run is one of {plain['script']}, with options of its own: batchscope run starts it again"
        )
    _check_top_level(plain)
    if lightning_module_of(plain):
        plain = {key: value for key, value in plain.items() if key not in OF_TASK}
    for section in SECTIONS:
        if section in OF_TASK and section not in plain:  # a network without one is refused when it is built
            continue
        if not isinstance(plain.get(section), dict):
            shown = "null" if plain.get(section) is None else repr(plain[section])
            raise UserError(f"{section}: got {shown}, takes {', '.join(choices_of(section))}")
        if plain[section].get(TARGET) is None:
            raise UserError(f"{section}._target_: is missing; it names the class to build")
        check_node(plain[section], section)
    if "batch_size" not in plain["data"] and _takes_batch_size(plain["data"][TARGET]):
        raise UserError("data.batch_size: is missing")
    for collection in COLLECTIONS:
        plain.setdefault(collection, None)
        _check_collection(plain[collection] or {}, collection)
    if plain["search"] is not None:
        plain["search"] = {TARGET: "batchscope.sweep.search.BatchSizeSearch", **plain["search"]}
        _check_search(plain["search"])
    _check_model_fits_data(plain["model"], plain["data"])
    _check_groups(plain.get("optimizer", {}))
    _check_pairs(plain)
    return plain


def _takes_batch_size(target: Any) -> bool:
    """Whether data have a batch size to set: not a data module that serves batches of its own."""
    signature = signature_of(target) if isinstance(target, str) else None
    return signature is None or signature.open or "batch_size" in signature.parameters


def _check_top_level(plain: dict[str, Any]) -> None:
    for key, value in DEFAULTS.items():
        plain.setdefault(key, value)
    for key in TOP_LEVEL:
        if key not in plain and key not in OF_EXPERIMENTS:
            raise UserError(f"{key}: is missing")
    for key, value in plain.items():
        if key in TOP_LEVEL:
            check_value(key, value, TOP_LEVEL[key])
        elif key not in SECTIONS + COLLECTIONS:
            raise no_such_option(key, value, top_level_names(), "", plain)


def _check_search(node: dict[str, Any]) -> None:
    """A search is one of those that the configs name: the sweep has to know what it asks for."""
    known = [one[TARGET] for one in known_nodes().get("search", ()) if TARGET in one]
    if node[TARGET] not in known:
        raise UserError(f"search.{TARGET}: got {node[TARGET]!r}, takes {' or '.join(known)}")
    check_node(node, "search")


def _check_pairs(config: dict[str, Any]) -> None:
    """Refuse options that do not go together."""
    compile, trainer, callbacks = config["compile"], config["trainer"], config["callbacks"] or {}
    module = lightning_module_of(config)
    batches = batches_of_update(config, ranks_asked(config) or 1)  # checked again by the ranks that there are
    strategy = trainer.get("strategy")
    is_sharded = isinstance(strategy, dict) or any(name in str(strategy) for name in ("fsdp", "deepspeed"))
    nodes = {name: node for name, node in callbacks.items() if node}
    averages = next((name for name, node in nodes.items() if node[TARGET].endswith("WeightAveraging")), "")
    validated = {name: node for name, node in nodes.items() if str(node.get("monitor")).startswith("val")}
    stops = next((name for name, node in validated.items() if node[TARGET].endswith("EarlyStopping")), "")
    prefix, no_validation = config["init_prefix"], trainer.get("limit_val_batches") == 0
    uses_graphs = compile in ("reduce-overhead", "max-autotune")
    conflicts = {
        "trainer.logger: takes null; logger=… takes the loggers, and logger=none leaves them out": trainer.get("logger")
        is not None,
        "trainer.callbacks: takes null; +callbacks.NAME={_target_: …} adds one": trainer.get("callbacks") is not None,
        f"init_prefix: got {prefix!r}, and there is no init=<file> to take it from": prefix and not config["init"],
        f"compile: {module} is a LightningModule, which compiles itself": compile and module,
        "compile: a sharded model is not compiled; write compile=false, or trainer=ddp": compile and is_sharded,
        "compile: torch compiles for CPUs and GPUs; write compile=false with trainer.accelerator=mps": compile
        and trainer.get("accelerator") == "mps",
        f"compile: {compile} uses CUDA graphs, which overwrite accumulated gradients; write compile=default": uses_graphs
        and batches > 1,
        f"callbacks.{averages}: keeps a whole copy of the weights, and trainer.strategy shards them": averages
        and isinstance(strategy, dict),
        "optimizer.schedule: plateau reads val/loss, and trainer.limit_val_batches=0 has no validation": no_validation
        and config.get("optimizer", {}).get("schedule") == "plateau",
        f"callbacks.{stops}: follows a validation, and trainer.limit_val_batches=0 has none": no_validation and stops,
    }
    if said := next((said for said, is_wrong in conflicts.items() if is_wrong), None):
        raise UserError(said)


def _check_groups(optimizer: dict[str, Any]) -> None:
    """Check the options of each group of parameters as those of the optimizer."""
    for number, group in enumerate(optimizer.get("groups") or []):
        options = {key: value for key, value in group.items() if key != "match"}
        signature = signature_at("optimizer", optimizer[TARGET])
        for key, value in options.items():
            option = f"optimizer.groups.{number}.{key}"
            if signature and not signature.open and key not in signature.parameters:
                raise UserError(f"{option}: no such option.{did_you_mean(key, signature.parameters)}")
            check_value(option, value, annotation_of(f"optimizer.{key}", optimizer[TARGET]))


def _check_collection(nodes: Any, name: str) -> None:
    if not isinstance(nodes, dict):
        raise UserError(f"{name}: got {nodes!r}, takes names, each with a _target_")
    for part, node in nodes.items():
        option = f"{name}.{part}"
        if isinstance(node, dict) and "_target_" in node:
            for logger, package in (("WandbLogger", "wandb"), ("MLFlowLogger", "mlflow")):
                if str(node["_target_"]).endswith(f".{logger}") and not is_installed(package):
                    raise UserError(f"{option}: {package} is not installed; pip install 'batchscope[{package}]'")
            if str(node["_target_"]).endswith(".BatchSizeFinder"):
                raise UserError(
                    f"{option}: BatchSizeFinder takes its trial steps from the learning-rate schedule; write "
                    "batchscope train -m experiment=find_batch_size …"
                )
            if str(node["_target_"]).endswith(".GradientAccumulationScheduler"):
                raise UserError(
                    f"{option}: changes how many batches an update takes, and the run is planned for one number; write "
                    "trainer.accumulate_grad_batches=…"
                )
        elif node is not None:
            raise UserError(f"{option}: {answer_to(option) or f'got {node!r}, takes null or a node with a _target_'}")
    check_node(nodes, name)


def _check_model_fits_data(model: dict[str, Any], data: dict[str, Any]) -> None:
    """Refuse a model that cannot read what the dataset serves; each declares it in a class attribute."""
    kind = class_attribute(data["_target_"], "kind")
    accepts = class_attribute(model["_target_"], "accepts")
    if kind and accepts and kind not in accepts:
        name = model["_target_"].rpartition(".")[2]
        fits = [choice for choice in choices_of("model") if kind in _accepted_by(choice)]
        raise UserError(
            f"model: {name} reads {' or '.join(accepts)} data, and data={data['_target_'].rpartition('.')[2]} serves "
            f"{kind} data; models that read it: {', '.join(fits)}"
        )


def _accepted_by(choice: str) -> tuple[str, ...]:
    """The kinds of data that a choice of the group `model` reads; nothing for a file that cannot be read."""
    file = file_of("model", choice)
    with contextlib.suppress(UserError):
        target = load(file).get("_target_") if file else None
        return class_attribute(target, "accepts") or () if isinstance(target, str) else ()
    return ()
