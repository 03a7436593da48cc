"""From a command line to checked configurations, before torch is imported: what a user did wrong is told at once.

Hydra composes; this file turns what Hydra would accept silently (`+data.batch_sise=3`) or refuse at length into one
line that names the option, what it got, what it takes, and the nearest right spelling.
"""

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..errors import UserError, did_you_mean
from . import schema
from .trainer import check_trainer
from .tree import flatten
from .types import Seed

# Ours of configs/hydra/launcher describe every option of the plugins' own, and are checked against them by their name.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

_HERE = Path(__file__).resolve().parents[1]
# In a checkout the configs lie beside the package's folder, in an installed wheel inside it.
CONFIGS = next(p for p in (_HERE / "configs", _HERE.parent / "configs") if p.is_dir())
GROUPS = sorted(p.name for p in CONFIGS.iterdir() if p.is_dir() and p.name != "__pycache__")
_LONGEST_NAME = 255  # bytes; of a file or folder, on the file systems in use
# The groups whose choice is one object to build, and those that are a collection of such objects.
SECTIONS = ("model", "data", "optimizer", "trainer")
COLLECTIONS = ("callbacks", "logger")
_OPTIONAL_GROUPS = (*COLLECTIONS, "experiment")  # `group=null` switches them off
# Hydra's plugins that an extra of ours installs: (group, choice) → extra.
_EXTRAS = {("hydra/launcher", "joblib"): "joblib", ("hydra/sweeper", "optuna"): "optuna"}
TOP_LEVEL: dict[str, Any] = {
    "seed": Seed,
    "test": bool,
    "optimized_metric": str | None,
    "channels_last": bool,
    "flush_denormals": bool,
    "keep_freed_memory": bool,
    "search": dict | None,
    "resume": str | None,
    "run_dir": str | None,
}


def options_of(group: str) -> list[str]:
    """The choices that a config group offers, by the names of its YAML files."""
    return sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


def check_command_line(
    overrides: list[str], multirun: bool, config_dir: str | None = None, run_dir: str | None = None
) -> list[dict[str, Any]]:
    """Compose and check every run that a command line asks for.

    Args:
        overrides: what follows `train.py`, without flags.
        multirun: whether a value may be a list to sweep over.
        config_dir: one more folder to look for YAML files in, as Hydra's own `--config-dir`.
        run_dir: the run's folder, where it is known.

    Returns:
        The plain configuration of each run.

    Raises:
        UserError: at the first mistake; nothing has been written by then.
    """
    parsed = _parse(overrides)
    if not multirun:
        _refuse_several_values(parsed)
    overrides = [*overrides, *_search_path(config_dir)]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        jobs = _expand(overrides, parsed) if multirun else [overrides]
        configs = [_compose_run(job, multirun) for job in jobs]
        if run_dir is not None:
            configs = [OmegaConf.merge(config, {"run_dir": run_dir}) for config in configs]
        return [check(config) for config in configs]


@dataclass(frozen=True)
class SweepPlan:
    """What a checked sweep will do, as far as it is known beforehand.

    Attributes:
        folder: where its runs go.
        chosen: whether a command line or a config names the folder; otherwise it is called by the time.
        labels: of each run the overrides that set it apart; empty if a searching sweeper decides what is run.
        launcher: the options of Hydra's launcher, which starts the runs.
    """

    folder: Path
    chosen: bool
    labels: list[str]
    launcher: dict[str, Any]


def plan_sweep(overrides: list[str], config_dir: str | None = None) -> SweepPlan:
    """The plan of a sweep that `check_command_line` has checked."""
    parsed = _parse(overrides)
    extra = _search_path(config_dir)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = _compose([o.input_line for o in parsed if not o.is_sweep_override()] + extra, hydra=True)
        jobs = _expand([*overrides, *extra], parsed)
    listed = config.hydra.sweeper._target_.endswith(".BasicSweeper")
    labels = [" ".join(word for word in job if not all(word in other for other in jobs)) for job in jobs]
    launcher = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    return SweepPlan(
        Path(config.hydra.sweep.dir),
        is_folder_chosen(config.hydra, "sweep"),
        [label or "the run" for label in labels] if listed else [],
        launcher,
    )


def is_folder_chosen(hydra: DictConfig, mode: Literal["run", "sweep"]) -> bool:
    """Whether a command line or a config names the folder of a run or a sweep; the installed default is the time."""
    installed = OmegaConf.load(CONFIGS / "hydra" / "default.yaml")
    composed, default = (OmegaConf.to_container(node[mode], resolve=False)["dir"] for node in (hydra, installed))
    return composed != default


def check_composition(overrides: list[str], config_dir: str | None = None) -> None:
    """Compose one configuration, and leave its values unchecked: it is only looked at.

    Raises:
        UserError: for what Hydra cannot compose.
    """
    _refuse_several_values(_parse(overrides))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        _compose([*overrides, *_search_path(config_dir)])


def accept_null_groups(overrides: list[str]) -> list[str]:
    """Write `logger=null` as `logger=[]`, which is how Hydra spells a group without a choice.

    Raises:
        UserError: for a text that cannot be parsed.
    """
    return [
        f"{o.key_or_group}=[]" if _is_null_group(o) else text
        for text, o in zip(overrides, _parse(overrides), strict=True)
    ]


def as_override(key: str, value: Any) -> str:
    """`key=value` as Hydra reads it back: quoted where the bare text would be split, evaluated or refused."""
    bare, quoted = f"{key}={value}", f"{key}={_literal(value)}"
    if not isinstance(value, str):
        return quoted
    try:
        return bare if OverridesParser.create().parse_override(bare).value() == value else quoted
    except HydraException:
        return quoted


def _literal(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, str):
        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_literal(child)}' for key, child in value.items())}}}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def override(config: DictConfig, overrides: list[str]) -> DictConfig:
    """Change a configuration that was composed earlier: `option=value`, `+`, `++`, `~`, `group=choice`, as train.py.

    Raises:
        UserError: for a text that cannot be parsed, an unknown option or an unknown choice.
    """
    parsed = _parse(overrides)
    _refuse_several_values(parsed, hint="")
    OmegaConf.set_struct(config := config.copy(), True)
    for one in parsed:
        if re.split("[./]", one.key_or_group)[0] in ("experiment", "hydra"):
            raise UserError(
                f"{one.key_or_group}: is for a new run; here, name the options to change: data.batch_size=8"
            )
        before, config = config, config.copy()
        if one.key_or_group in GROUPS:
            _override_group(config, one)
            continue
        try:
            ConfigLoaderImpl._apply_overrides_to_config([one], config)
        except (HydraException, OmegaConfBaseException) as error:
            raise _wrong_key(before, one) or UserError(f"{one.input_line}: {_first_line(error)}") from error
    return config


def _override_group(config: DictConfig, one: Override) -> None:
    """Take another choice of a config group: `data=mnist`; `logger=null` and `~logger` leave a collection out."""
    group = one.key_or_group
    with open_dict(config):
        if _is_null_group(one) or one.is_delete():
            config[group] = None
            return
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config[group] = _compose([str(one.input_line)]).get(group)


def spelled_out(overrides: Iterable[str]) -> tuple[set[str], set[str]]:
    """What `option=value` texts decide, as `override` applies them.

    Returns:
        The full names of the options that get a value, and the groups that get a choice. A value in braces is merged
        into its node, and gives a value to the options that it names only; a choice replaces the group's node.

    Raises:
        UserError: for a text that cannot be parsed.
    """
    options: set[str] = set()
    groups: set[str] = set()
    for one in _parse(list(overrides)):
        key = one.key_or_group
        if key in GROUPS:
            groups.add(key)
        elif not one.is_delete():
            value = one.value()
            options |= {name for name, _ in flatten(value, f"{key}.")} if isinstance(value, dict) else {key}
    return options, groups


def check(config: DictConfig) -> dict[str, Any]:
    """Check one composed configuration and return it as plain, resolved containers.

    Raises:
        UserError: for an option that is unknown, of the wrong kind or out of range, and for a pair that cannot work.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {_first_line(error)}") from error
    for key in TOP_LEVEL:
        if key not in plain:
            raise UserError(f"{key}: is missing")
    for key, value in plain.items():
        if key in TOP_LEVEL:
            schema.check_value(key, value, TOP_LEVEL[key])
        elif key not in SECTIONS + COLLECTIONS:
            near = did_you_mean(key, _top_level_words()) or _elsewhere(config, [key])
            raise UserError(f"{key}: no such option.{near}")
    for section in SECTIONS:
        if not isinstance(plain.get(section), dict) or plain[section].get("_target_") is None:
            shown = "null" if plain.get(section) is None else repr(plain[section])
            raise UserError(f"{section}: got {shown}, takes {' or '.join(options_of(section))}")
        schema.check(plain[section], section)
    check_trainer(plain["trainer"])
    if "batch_size" not in plain["data"]:
        raise UserError("data.batch_size: is missing")
    for collection in COLLECTIONS:
        plain.setdefault(collection, None)
        _check_collection(plain[collection] or {}, collection)
    if plain["search"] is not None:
        schema.check({"_target_": "batchscope.sweep.search.BatchSizeSearch", **plain["search"]}, "search")
    _check_pair(plain["model"], plain["data"])
    return plain


def _check_collection(nodes: Any, name: str) -> None:
    """Of a collection every part is an object to build, or null for none."""
    if not isinstance(nodes, dict):
        raise UserError(f"{name}: got {nodes!r}, takes names, each with a _target_")
    for part, node in nodes.items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            raise UserError(f"{name}.{part}: got {node!r}, takes null or a node with a _target_")
        if node is not None and str(node["_target_"]).endswith(".BatchSizeFinder"):
            raise UserError(
                f"{name}.{part}: BatchSizeFinder takes its trial steps from the learning-rate schedule; write "
                f"python train.py -m experiment=find_batch_size …"
            )
    schema.check(nodes, name)


def _check_pair(model: dict[str, Any], data: dict[str, Any]) -> None:
    """Refuse a model that cannot read what the dataset serves: both say so in a class attribute."""
    kind = schema.class_attribute(data["_target_"], "kind")
    accepts = schema.class_attribute(model["_target_"], "accepts")
    if kind and accepts and kind not in accepts:
        name = model["_target_"].rpartition(".")[2]
        fits = [m for m in options_of("model") if kind in (_accepts(m) or ())]
        raise UserError(
            f"model: {name} reads {' or '.join(accepts)} data, and data={data['_target_'].rpartition('.')[2]} serves "
            f"{kind} data; models that read it: {', '.join(fits)}"
        )


def _accepts(option: str) -> tuple[str, ...] | None:
    node = OmegaConf.load(CONFIGS / "model" / f"{option}.yaml")
    return schema.class_attribute(str(node.get("_target_")), "accepts")


# --- Hydra -----------------------------------------------------------------------------------------------------------


def _parse(overrides: list[str]) -> list[Override]:
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        text = error.override
        reason = _why_unparsed(error) if "=" in text or text.startswith("~") else _takes_an_option(text)
        raise UserError(f"{text or repr(text)}: cannot be parsed: {reason}", exit_code=2) from error
    for one in parsed:
        if not one.key_or_group:
            raise UserError(f"{one.input_line}: cannot be parsed: no option before '='", exit_code=2)
    return parsed


def _why_unparsed(error: OverrideParseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Error parsing override", "See https://"))]
    if re.match(r"[^=]*\s=|[^=]*=\s", error.override):
        return "write option=value without spaces around the ="
    if "LexerNoViableAlt" in str(error):
        return "a quote is not closed, or a character has to stand in quotes: option='value'"
    # What Hydra's grammar expected instead is a list of its own token names.
    return said[0].partition(" expecting ")[0] if said else "write option=value"


def _takes_an_option(word: str) -> str:
    groups = [group for group in GROUPS if group != "hydra" and word in options_of(group)]
    return "options are written as option=value" + (f"; did you mean '{groups[0]}={word}'?" if groups else "")


def _is_null_group(one: Override) -> bool:
    return one.key_or_group in _OPTIONAL_GROUPS and not one.is_delete() and one.value() is None


def _refuse_several_values(
    parsed: list[Override], hint: str = "; write python train.py -m … to run each of them"
) -> None:
    for one in parsed:
        if one.is_sweep_override():
            raise UserError(f"{one.key_or_group}: got several values, takes one{hint}")


def _search_path(config_dir: str | None) -> list[str]:
    """The override by which `compose` finds the YAML files of `--config-dir`."""
    if config_dir is None:
        return []
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise UserError(f"--config-dir: got '{config_dir}', which is not a folder")
    return [f"hydra.searchpath=[{QuotedString(f'file://{folder}', Quote.single).with_quotes()}]"]


def _expand(overrides: list[str], parsed: list[Override]) -> list[list[str]]:
    """The runs of a sweep. Only Hydra's basic sweeper has a list that is known beforehand; of another, one value each.

    A search over a range is checked at its first value: its sweeper decides the others later.
    """
    swept = [o for o in parsed if o.is_sweep_override()]
    if any(not o.is_discrete_sweep() for o in swept):
        fixed = [text for text, o in zip(overrides, parsed, strict=False) if not o.is_sweep_override()]
        return [fixed + overrides[len(parsed) :]]
    extra = overrides[len(parsed) :]
    config = _compose([o.input_line for o in parsed if not o.is_sweep_override()] + extra, hydra=True)
    from_file = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    everything = _parse(from_file) + parsed
    for one in everything:
        one.config_loader = GlobalHydra.instance().config_loader()  # which knows the choices that glob(*) names
    batches = BasicSweeper.split_arguments(everything, max_batch_size=None)
    return [list(job) + extra for batch in batches for job in batch]


def _compose(overrides: list[str], hydra: bool = False) -> DictConfig:
    try:
        config = hydra_compose("train", overrides, return_hydra_config=True)
    except MissingConfigException as error:
        raise _missing_choice(error) from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        raise UserError(f"{where}: {getattr(error, 'problem', None) or _first_line(error)}") from error
    except RecursionError as error:
        raise UserError("a YAML file or an option has too many levels") from error
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        raise _explain(overrides, error) from error
    if not hydra:
        with open_dict(config):
            del config["hydra"]
    return config


def _compose_run(overrides: list[str], multirun: bool) -> DictConfig:
    """A run's configuration, after a look at where it would leave its files."""
    config = _compose(overrides, hydra=True)
    if config.hydra.mode not in (None, RunMode.MULTIRUN if multirun else RunMode.RUN):
        raise UserError(
            f"hydra.mode: got {config.hydra.mode.name}; write python train.py -m … for several runs, without -m for one"
        )
    with open_dict(config):
        if multirun:
            config.hydra.job.num = config.hydra.job.id = 0
        for name in ("sweep.dir", "sweep.subdir") if multirun else ("run.dir",):
            _check_folder(config.hydra, name)
        del config["hydra"]
    return config


def _check_folder(hydra: DictConfig, name: str) -> None:
    """An option's value that became a part of a folder's name must not lead out of that folder."""
    try:
        folder = OmegaConf.select(hydra, name)
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.{name}: {_first_line(error)}") from error
    parts = Path(str(folder)).parts
    if (
        folder is None
        or ".." in parts
        or "\0" in str(folder)
        or (name == "sweep.subdir" and Path(str(folder)).is_absolute())
    ):
        takes = (
            "a folder below the sweep's" if name == "sweep.subdir" else "a folder below this one, or an absolute path"
        )
        raise UserError(f"hydra.{name}: got {str(folder)[:100]!r}, takes {takes}, without '..'")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        raise UserError(f"hydra.{name}: has a name of more than {_LONGEST_NAME} bytes in it: '{str(folder)[:60]}…'")


def _missing_choice(error: MissingConfigException) -> UserError:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if (group, name) in _EXTRAS:
        return UserError(f"{group}: {name} is not installed; pip install 'batchscope[{_EXTRAS[group, name]}]'")
    options = sorted({*(options_of(group) if group in GROUPS else ()), *(error.options or ())})
    return UserError(f"{group}: got '{name}', takes {', '.join(options)}.{did_you_mean(name, options)}")


def _explain(overrides: list[str], error: Exception) -> UserError:
    """Find the override that Hydra stumbled over, and say what it may have been meant to be."""
    parsed = _parse(overrides)
    for override in parsed:
        group = override.key_or_group
        if group in GROUPS and override.is_add():
            return UserError(f"{group}: is chosen already; write {group}=… without the plus")
        if group in GROUPS and not override.is_delete() and not isinstance(value := override.value(), str | list):
            shown = "null" if value is None else repr(value)
            return UserError(f"{group}: got {shown}, takes {', '.join(options_of(group))}")
    choices = [o.input_line for o in parsed if re.split("[@/]", o.get_key_element().lstrip("+~"))[0] in GROUPS]
    try:
        base = hydra_compose("train", choices, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError, OSError):
        return UserError(_first_line(error))
    wrong = (_wrong_key(base, override) for override in parsed if override.key_or_group not in GROUPS)
    return next(filter(None, wrong), None) or UserError(_first_line(error))


def _wrong_key(base: DictConfig, one: Override) -> UserError | None:
    """What is wrong with the option's name in `option=value`, `+option=value` or `~option`; None if nothing is."""
    key = one.key_or_group
    wrong = _unknown_part(base, key)
    if not one.is_add() and not one.is_force_add() and wrong:
        return wrong
    there = None if wrong else OmegaConf.select(base, key, throw_on_resolution_failure=False)
    if one.is_add() and there is not None and not isinstance(one.value(), dict | list):  # which would be merged
        return UserError(f"{key}: is set already; write {key}=… without the plus")
    if one.is_delete() and there is None:
        return UserError(f"{key}: is null, which leaves nothing to delete")
    return None


def _unknown_part(base: DictConfig, key: str) -> UserError | None:
    """The first part of a dotted key that the configuration does not have, with the nearest that it has."""
    node: Any = base
    parts = key.replace("/", ".").split(".")
    for depth, part in enumerate(parts):
        if not OmegaConf.is_dict(node):
            parent = ".".join(parts[:depth])
            what = "null" if OmegaConf.select(base, parent, throw_on_resolution_failure=False) is None else "a value"
            return UserError(f"{key}: no such option. {parent} is {what}, not a section.")
        if part not in node:
            parent = ".".join(parts[:depth])
            if not parent and part in COLLECTIONS:
                return UserError(f"{key}: there is no {part} section to set it in; {part}=null leaves the section out")
            extra = schema.parameters_of(node.get("_target_") if "_target_" in node else None)
            if part in extra:
                return UserError(f"{key}: not set by the config; write +{key}=… to set it")
            known = [str(k) for k in node if not str(k).startswith("_")] + extra if parent else _top_level_words()
            shown = [str(k) for k in node if not str(k).startswith("_")] if parent else _top_level_words()
            takes = f" {parent or 'The command'} takes {', '.join(shown)}." if len(shown) <= 16 else ""
            near = did_you_mean(part, known) or _elsewhere(base, parts)
            return UserError(f"{key}: no such option.{near}{takes}")
        node = node._get_node(part)
    return None


def _elsewhere(base: DictConfig, parts: list[str]) -> str:
    """The option of another section that ends in what was written (`batch_size`), or whose last word it nearly is."""
    options = [option for option in _paths(base) if option != ".".join(parts)]
    same = [option for option in options if option.split(".")[-len(parts) :] == parts]
    words = {option.rpartition(".")[2]: option for option in reversed(options)}
    near = difflib.get_close_matches(parts[-1], words, n=1, cutoff=0.8)
    found = same[:1] or [words[word] for word in near]
    return f" Did you mean '{found[0]}'?" if found else ""


def _paths(node: DictConfig, above: str = "") -> Iterator[str]:
    """The full names of everything that a configuration sets, sections included, but Hydra's own."""
    for key in node:
        if not str(key).startswith("_") and key != "hydra":
            yield f"{above}{key}"
            if OmegaConf.is_dict(child := node._get_node(key)):
                yield from _paths(child, f"{above}{key}.")


def _top_level_words() -> list[str]:
    return [g for g in GROUPS if g != "hydra"] + [k for k in TOP_LEVEL if k != "run_dir"] + ["hydra"]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
