"""A composed configuration → plain, checked containers, or one line that says what is wrong with it."""

import contextlib
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import UserError, did_you_mean
from .explain import first_line, nearest_option
from .groups import COLLECTIONS, SECTIONS, choices_of, file_of, known_nodes, load, to_plain, top_level_names
from .habits import habit
from .nodes import TARGET, check_node, targets_in
from .purpose import DEFAULTS, OF_EXPERIMENTS, TOP_LEVEL, annotation_of, signature_at
from .signatures import class_attribute, is_installed, missing_part, signature_of
from .tree import flatten
from .update import batches_of_update, ranks_asked
from .values import check_value


def check_config(config: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Check one composed configuration and return it in plain containers, its interpolations resolved.

    Raises:
        UserError: for an option that is unknown, of the wrong kind or out of range, and for a model that cannot read
            the data.
    """
    try:
        node = config if isinstance(config, DictConfig) else OmegaConf.create(config)
        if missing := sorted(name for name, value in flatten(to_plain(node)) if value == "???"):
            raise UserError(f"{missing[0]}: has no value; write {missing[0]}=…")
        plain = to_plain(node, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {first_line(error)}") from error
    if "script" in plain:
        raise UserError(
            f"script: the run is one of {plain['script']}, with options of its own: batchscope run starts it again"
        )
    _check_top_level(plain)
    for section in SECTIONS:
        if not isinstance(plain.get(section), dict) or plain[section].get("_target_") is None:
            shown = "null" if plain.get(section) is None else repr(plain[section])
            raise UserError(f"{section}: got {shown}, takes {' or '.join(choices_of(section))}")
        check_node(plain[section], section)
    if "batch_size" not in plain["data"] and _takes_batch_size(plain["data"][TARGET]):
        raise UserError("data.batch_size: is missing")
    for collection in COLLECTIONS:
        plain.setdefault(collection, None)
        _check_collection(plain[collection] or {}, collection)
    if plain["search"] is not None:
        _check_search({TARGET: "batchscope.sweep.search.BatchSizeSearch", **plain["search"]})
    _check_model_fits_data(plain["model"], plain["data"])
    if plain["init_prefix"] and not plain["init"]:
        raise UserError(f"init_prefix: got {plain['init_prefix']!r}, and there is no init=<file> to take it from")
    batches = batches_of_update(plain, ranks_asked(plain) or 1)  # checked again by the ranks that there are
    _check_compile(plain["compile"], plain["trainer"], batches)
    _check_averaging(plain["callbacks"] or {}, plain["trainer"])
    _check_groups(plain["optimizer"])
    if plain["optimizer"].get("schedule") == "plateau" and plain["trainer"].get("limit_val_batches") == 0:
        raise UserError("optimizer.schedule: plateau reads val/loss, and trainer.limit_val_batches=0 has no validation")
    return plain


def check_targets(config: dict[str, Any]) -> None:
    """Raise UserError for a `_target_` that does not exist, as far as source texts show it: torch is not imported."""
    for section in (*SECTIONS, *COLLECTIONS):
        for option, target in targets_in(config[section], section):
            if isinstance(target, str) and (missing := missing_part(target)):
                raise UserError(f"{option}: {target} cannot be imported: {missing}")


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
            if known := habit(key, str(value)):
                raise known
            near = nearest_option(plain, [key], did_you_mean(key, top_level_names()))
            raise UserError(f"{key}: no such option.{near}")


def _check_search(node: dict[str, Any]) -> None:
    """A search is one of those that the configs name: the sweep has to know what it asks for."""
    known = [one[TARGET] for one in known_nodes().get("search", ()) if TARGET in one]
    if node[TARGET] not in known:
        raise UserError(f"search.{TARGET}: got {node[TARGET]!r}, takes {' or '.join(known)}")
    check_node(node, "search")


def _check_compile(compile: bool | str, trainer: dict[str, Any], batches: int) -> None:
    """Refuse what torch.compile does not go together with, as far as the options show it."""
    strategy = trainer.get("strategy")
    if not compile:
        return
    if isinstance(strategy, dict) or any(name in str(strategy) for name in ("fsdp", "deepspeed")):
        raise UserError("compile: a sharded model is not compiled; write compile=false, or trainer=ddp")
    if trainer.get("accelerator") == "mps":
        raise UserError("compile: torch compiles for CPUs and GPUs; write compile=false with trainer.accelerator=mps")
    if compile in ("reduce-overhead", "max-autotune") and batches > 1:
        raise UserError(
            f"compile: {compile} uses CUDA graphs, which overwrite accumulated gradients; write compile=default or "
            "compile=max-autotune-no-cudagraphs"
        )


def _check_averaging(callbacks: dict[str, Any], trainer: dict[str, Any]) -> None:
    for name, node in callbacks.items():
        if node and node["_target_"].endswith("WeightAveraging") and isinstance(trainer.get("strategy"), dict):
            raise UserError(f"callbacks.{name}: keeps a whole copy of the weights, and trainer.strategy shards them")


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
        elif node is not None:
            raise UserError(f"{option}: got {node!r}, takes null or a node with a _target_")
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
