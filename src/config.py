"""From a command line to checked configurations, before torch is imported: what a user did wrong is told at once.

Hydra composes; this file turns what Hydra would accept silently (`+data.batch_sise=3`) or refuse at length into one
line that names the option, what it got, what it takes, and the nearest right spelling.
"""

import difflib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from . import schema
from .errors import UserError, did_you_mean
from .options import Seed

# Ours of configs/hydra/launcher describe every option of the plugins' own, and are checked against them by their name.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

_HERE = Path(__file__).resolve().parent
# In a checkout the configs lie beside the package's folder, in an installed wheel inside it.
CONFIGS = next(p for p in (_HERE / "configs", _HERE.parent / "configs") if p.is_dir())
GROUPS = sorted(p.name for p in CONFIGS.iterdir() if p.is_dir() and p.name != "__pycache__")
_LONGEST_NAME = 255  # bytes; of a file or folder, on the file systems in use
# The groups whose choice is one object to build, and those that are a collection of such objects.
SECTIONS = ("model", "data", "optimizer", "trainer")
COLLECTIONS = ("callbacks", "logger")
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
    if config_dir:
        overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
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
        labels: of each run the overrides that set it apart; empty if a searching sweeper decides what is run.
        launcher: the options of Hydra's launcher, which starts the runs.
    """

    folder: Path
    labels: list[str]
    launcher: dict[str, Any]


def plan_sweep(overrides: list[str], config_dir: str | None = None) -> SweepPlan:
    """The plan of a sweep that `check_command_line` has checked."""
    parsed = _parse(overrides)
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = _compose([o.input_line for o in parsed if not o.is_sweep_override()] + extra, hydra=True)
        jobs = _expand([*overrides, *extra], parsed)
    listed = config.hydra.sweeper._target_.endswith(".BasicSweeper")
    labels = [" ".join(word for word in job if not all(word in other for other in jobs)) for job in jobs]
    launcher = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    return SweepPlan(Path(config.hydra.sweep.dir), [label or "the run" for label in labels] if listed else [], launcher)


def override(config: DictConfig, overrides: list[str]) -> DictConfig:
    """Apply `option=value` (or `group=choice`) texts to a configuration that was composed earlier.

    Raises:
        UserError: for a text that cannot be parsed, an unknown option or an unknown choice.
    """
    config = config.copy()
    for text, parsed in zip(overrides, _parse(overrides), strict=True):
        key = parsed.key_or_group
        if key in GROUPS:
            with initialize_config_dir(str(CONFIGS), version_base="1.3"):
                config[key] = _compose([text])[key]
        elif parsed.is_sweep_override():
            raise UserError(f"{key}: got several values, takes one")
        else:
            wrong = _unknown_part(config, key)
            if wrong:
                raise wrong
            OmegaConf.update(config, key, parsed.value())
    return config


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
            raise UserError(f"{section}: got {plain.get(section)!r}, takes {' or '.join(options_of(section))}")
        schema.check(plain[section], section)
    for collection in COLLECTIONS:
        schema.check(plain.get(collection) or {}, collection)
    schema.check(plain.get("search"), "search")
    _check_pair(plain["model"], plain["data"])
    return plain


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
        return OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        raise UserError(f"{error.override}: cannot be parsed: {_first_line(error)}", exit_code=2) from error


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
    batches = BasicSweeper.split_arguments(_parse(from_file) + parsed, max_batch_size=None)
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
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        raise _explain(overrides, error) from error
    if not hydra:
        with open_dict(config):
            del config["hydra"]
    return config


def _compose_run(overrides: list[str], multirun: bool) -> DictConfig:
    """A run's configuration, after a look at where it would leave its files."""
    config = _compose(overrides, hydra=True)
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
    options = options_of(group) if group in GROUPS else list(error.options or [])
    return UserError(f"{group}: got '{name}', takes {', '.join(options)}.{did_you_mean(name, options)}")


def _explain(overrides: list[str], error: Exception) -> UserError:
    """Find the override that Hydra stumbled over, and say what it may have been meant to be."""
    parsed = _parse(overrides)
    for override in parsed:
        group, value = override.key_or_group, override.value()
        if not group:
            return UserError(f"{override.input_line}: cannot be parsed: no option before '='", exit_code=2)
        if group in GROUPS and value is not None and not isinstance(value, str | list):
            return UserError(f"{group}: got {value!r}, takes {', '.join(options_of(group))}")
    choices = [o.input_line for o in parsed if re.split("[@/]", o.get_key_element().lstrip("+~"))[0] in GROUPS]
    try:
        base = hydra_compose("train", choices, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError, OSError):
        return UserError(_first_line(error))
    for override in parsed:
        key = override.key_or_group
        if key in GROUPS or override.is_add() or override.is_force_add():
            continue
        wrong = _unknown_part(base, key)
        if wrong:
            return wrong
    return UserError(_first_line(error))


def _unknown_part(base: DictConfig, key: str) -> UserError | None:
    """The first part of a dotted key that the configuration does not have, with the nearest that it has."""
    node: Any = base
    parts = key.replace("/", ".").split(".")
    for depth, part in enumerate(parts):
        if not OmegaConf.is_dict(node):
            return None
        if part not in node:
            parent = ".".join(parts[:depth])
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
