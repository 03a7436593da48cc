"""From a command line to its runs: Hydra composes the configuration of each run once, and each is checked."""

import functools
import itertools
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.core.utils import env_override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError

from .. import _hydra
from .._system import folder_error
from ..errors import UserError
from .check import check_config, refuse_callbacks, refuse_untaken
from .groups import CONFIGS, GROUPS, OPTIONAL_GROUPS, SECTIONS, config_dir, load, refuse_unreadable, to_plain
from .hints import message_of, missing_choice, resolving, unknown_option
from .overrides import combinations, options_and_groups, parse, quoted, text_of
from .purpose import learning_rate_option, lightning_module_of, why_no_validation, why_unread
from .tree import TARGET, walk

# The launchers of configs/hydra/launcher describe every option of their plugins and are validated by their names.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

_RATE = "optimizer.lr"
_DECIMAL_COMMA = re.compile(r"=(-?0,\d+)$")
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)
_FILE_ERRORS = (YAMLError, UnicodeError, GrammarParseError)  # their messages name no file, or a wrong line
_SPLIT_HINT = "; write one command for each value"


@dataclass(frozen=True)
class CommandLine:
    """The runs that a command line asks for."""

    configs: list[dict[str, Any]]  # checked, one for each run
    compositions: list[DictConfig]  # as Hydra composed them, with Hydra's section, one for each run
    folder: Path  # of the run, or of the sweep
    is_folder_chosen: bool  # whether the command line or a config names the folder, which is else named by the time
    words: list[str]  # the overrides of the command line, and those that a config sweeps over
    # For each run of a sweep, the overrides that only some runs have; empty if a searching sweeper decides them.
    labels: list[str]
    launcher: dict[str, Any]  # the options of Hydra's launcher, which starts a sweep's runs; empty for a single run


@resolving("hydra")
def compose_command_line(overrides: list[str], multirun: bool) -> CommandLine:
    """Compose and check every run that the overrides of `batchscope train` ask for.

    With `multirun` a value may be a list to sweep over. Raises UserError at the first mistake; nothing is written.
    """
    choices = [word.partition("=")[2].strip("[]") for word in overrides if word.lstrip("+").startswith("experiment=")]
    if len(choices) > 1:  # Hydra would take the last one
        raise UserError(f"experiment: is written {len(choices)} times; write 'experiment=[{','.join(choices)}]'")
    parsed = parse(overrides)
    base = compose(_without_sweeps(parsed))
    if not multirun:  # a search takes no -m
        _refuse_several_values(
            parsed, _SPLIT_HINT if base.get("search") else f"{_SPLIT_HINT}, or batchscope train -m … for a sweep"
        )
    params = {str(key): str(value) for key, value in (base.hydra.sweeper.get("params") or {}).items() if multirun}
    plain = to_plain(without_hydra(base)) if _RATE in params else {}
    if _RATE in params and not base.get("test") and (why := why_no_validation(plain)):
        raise UserError(f"{_RATE}: a validation says which rate is the best, and {why}")
    # Where a config sweeps over optimizer.lr, sweep over the option that the LightningModule reads its rate from.
    if lightning_module_of(plain) and (rate := learning_rate_option(plain)):
        rates = params.pop(_RATE)
        typed = {word.lstrip("+").partition("=")[0] for word in overrides}
        params |= {} if rate in typed else {rate: rates}
        words = [*map("=".join, params.items()), "hydra.sweeper.params=null", *overrides]
        return compose_command_line(words, multirun)
    words = [*map("=".join, params.items()), *overrides]
    is_grid = multirun and base.hydra.sweeper._target_.endswith(".BasicSweeper")
    runs = _split_into_runs(words, is_grid) if multirun else [words]
    compositions = [compose(run) for run in runs] if multirun else [base]
    hydra, kind = base.hydra, "sweep" if multirun else "run"
    default_dir = _default_folders()[kind]["dir"]  # named by the time
    configs = []
    for composition in compositions:
        with env_override(dict(composition.hydra.job.env_set)):  # an option may read a variable: ${oc.env:…}
            _check_folder(composition.hydra, f"{kind}.dir")
            configs.append(check_config(without_hydra(composition)))
        refuse_callbacks(configs[-1])
    if any(config["resume"] for config in configs):
        raise UserError("resume: is for the command line of one run alone: batchscope train resume=<run folder>")
    with env_override(dict(hydra.job.env_set)):
        folder, is_chosen = Path(hydra[kind].dir), to_plain(hydra[kind])["dir"] != default_dir
    _refuse_unread(runs if len(runs) > 1 else [words], configs)
    labels = _labels(runs) if is_grid else []
    launcher = to_plain(hydra.launcher, resolve=True) if multirun else {}
    to_plain(hydra.sweeper, resolve=multirun)  # raises what Hydra would raise later
    words = [*words, *(["hydra.sweeper.params=null"] if params else [])]  # the params are words now
    return CommandLine(configs, compositions, folder, is_chosen, words, labels, launcher)


def check_command_line(overrides: list[str], multirun: bool) -> list[dict[str, Any]]:
    """Return the checked configurations of `compose_command_line`."""
    return compose_command_line(overrides, multirun).configs


def choices_in(hydra: Any) -> dict[str, str]:
    """Return the choice of each group, from Hydra's section of a composition; see `choices_after`."""
    return choices_after(hydra.runtime.choices, list(hydra.overrides.task))


def choices_after(choices: Mapping[str, Any], overrides: list[str]) -> dict[str, str]:
    """Return the choices by group after these overrides; a group whose `_target_` is overridden is left out."""
    selecting = [override for override in parse(overrides) if _selects_files(override)]
    typed = {override.key_or_group: override.value() for override in selecting if override.key_or_group in SECTIONS}
    options = options_and_groups(overrides)[0]
    return {k: str(v) for k, v in {**choices, **typed}.items() if v is not None and f"{k}.{TARGET}" not in options}


def without_hydra(composition: DictConfig) -> DictConfig:
    """Return a copy of a composition without Hydra's section, which is what its run gets."""
    return OmegaConf.masked_copy(composition, [key for key in composition if key != "hydra"])


def apply_overrides(config: dict[str, Any], overrides: list[str]) -> DictConfig:
    """Apply overrides to a configuration that was composed earlier; UserError for an unknown option or choice."""
    parsed = parse(overrides)
    _refuse_several_values(parsed, hint="")
    changed = OmegaConf.create(config)
    OmegaConf.set_struct(changed, True)
    for override in sorted(parsed, key=lambda o: not _selects_files(o)):  # choices first: they replace options
        if "/" in override.key_or_group or override.key_or_group.partition(".")[0] in (*OPTIONAL_GROUPS, "hydra"):
            raise UserError(
                f"{override.key_or_group}: is for a new run; here, name the options to change: trainer.accelerator=cpu"
            )
        if override.key_or_group not in GROUPS or not _selects_files(override):
            _set_option(changed, override)
            continue
        node = None if override.is_delete() else compose([text_of(override)]).get(override.key_or_group)
        if override.key_or_group == "trainer" and node and changed.trainer:
            node = _switch_trainer(changed.trainer, node)
        with open_dict(changed):
            changed[override.key_or_group] = node
    _refuse_unread([overrides], [to_plain(changed)])
    return changed


def _switch_trainer(trainer: DictConfig, choice: DictConfig) -> dict[str, Any]:
    """Return the trainer with the devices of a choice, and with the choice's options that differ from the defaults."""
    default, device_options = to_plain(compose([]).trainer), ("accelerator", "devices", "num_nodes", "strategy")
    changed = {k: v for k, v in to_plain(choice).items() if k in device_options or (k, v) not in default.items()}
    return to_plain(trainer) | changed


def compose(overrides: list[str]) -> DictConfig:
    """Compose train.yaml with overrides, Hydra's section included; UserError for what Hydra cannot compose.

    Reading and merging YAML files takes most of the time, and depends on the choices alone. A process composes the same
    choices once, and sets the options of each run in a copy.
    """
    parsed = parse(overrides)
    _refuse_several_values(parsed, _SPLIT_HINT)
    try:
        pickled = composed(tuple(text_of(override) for override in parsed if _selects_files(override)), config_dir())
    except MissingConfigException as error:
        raise missing_choice(error) from error
    except RecursionError as error:
        raise UserError("a YAML file or an option has too many levels") from error
    except (*_HYDRA_ERRORS, YAMLError) as error:
        inner = error if str(error) else error.__cause__ or error  # Hydra wraps some errors in one without a message
        if isinstance(inner, _FILE_ERRORS):
            refuse_unreadable()
        raise UserError(message_of(inner)) from error
    config = pickle.loads(pickled)
    for override in parsed:
        if not _selects_files(override):
            _set_option(config, override)
    _hydra.complete_hydra_section(config, parsed)
    return config


def words_for_hydra(words: list[str]) -> list[str]:
    """Return a sweep's overrides for Hydra: with `++` before an option that some run does not list, as in `_set_option`."""
    parsed = parse(words)
    runs = combinations([text_of(o) for o in parsed if _selects_files(o) and not o.is_interval_sweep()])
    values_by_run = (walk(to_plain(compose(run))) for run in runs)
    listed = set.intersection(*({name for name, value in run if not isinstance(value, dict)} for run in values_by_run))

    def needs_no_prefix(override: Override) -> bool:
        is_listed = override.key_or_group in listed or override.is_hydra_override() or _selects_files(override)
        return is_listed or override.get_key_element()[0] in "+~"

    return [text_of(override) if needs_no_prefix(override) else f"++{text_of(override)}" for override in parsed]


def search_path() -> list[str]:
    """Return the override by which Hydra finds the YAML files of `--config-dir`; an empty list without that flag."""
    folder = config_dir()
    return [] if folder is None else [f"hydra.searchpath=[{quoted(f'file://{folder}')}]"]


@functools.lru_cache(maxsize=256)
def composed(choices: tuple[str, ...], folder: Path | None) -> bytes:
    """Return the configuration of these choices, pickled: OmegaConf copies five times slower than pickle."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return pickle.dumps(hydra_compose("train", [*choices, *search_path()], return_hydra_config=True))


def _selects_files(override: Override) -> bool:
    """Whether an override may decide which files are composed; `data={batch_size: 8}` only sets options."""
    group = override.key_or_group
    if group.partition("/")[0] in GROUPS:
        return override.is_delete() or not isinstance(override.value(), dict)
    return override.package is not None or ("." not in group and (override.is_add() or override.is_force_add()))


def _set_option(config: DictConfig, override: Override) -> None:
    """Set, add or delete an option. Any option may be added to a section: `check_config` checks it against the class."""
    key, text = override.key_or_group, text_of(override)
    try:
        if override.get_key_element()[0] not in "+~" and not key.startswith("hydra."):
            parent = key.rpartition(".")[0]
            section = OmegaConf.select(config, parent) if parent else config
            is_section = isinstance(section, DictConfig | ListConfig) if parent else key in {*config}  # null, too
            makes_section = key.endswith(f".{TARGET}")  # trainer.strategy._target_=… replaces a text by a node
            if not (is_section or makes_section):
                raise unknown_option(to_plain(config), key, text.partition("=")[2])
            if not isinstance(section, ListConfig):
                (override,) = parse([f"++{text}"])
        _hydra.apply_override(override, config)
    except _HYDRA_ERRORS as error:
        is_null = not override.is_delete() and override.value() is None
        raise UserError(f"{key}: {'got null, takes a value' if is_null else message_of(error)}") from error


@functools.cache
def _default_folders() -> Any:
    return load(CONFIGS / "hydra" / "default.yaml")


def _refuse_several_values(parsed: list[Override], hint: str) -> None:
    for override in parsed:
        if override.is_sweep_override():
            decimal = _DECIMAL_COMMA.search(text_of(override))
            decimal_hint = f"; a decimal number has a point: {decimal[1].replace(',', '.')}" if decimal else ""
            raise UserError(f"{override.key_or_group}: got several values, takes one{hint}{decimal_hint}")


def _without_sweeps(parsed: list[Override]) -> list[str]:
    return [text_of(override) for override in parsed if not override.is_sweep_override()]


def _split_into_runs(words: list[str], is_grid: bool) -> list[list[str]]:
    """Return the overrides of each run of a sweep, without the intervals, whose values a search chooses later."""
    parsed = parse(words)
    intervals = [text_of(o) for o in parsed if o.is_sweep_override() and not o.is_discrete_sweep()]
    if intervals and is_grid:
        raise UserError(f"{intervals[0]}: an interval is for a sweeper that searches; add hydra/sweeper=optuna")
    return [_without_sweeps(parsed)] if intervals else combinations([*map(text_of, parsed)])


def _refuse_unread(runs: Sequence[list[str]], configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for the first override that none of its runs reads, or that distinguishes a run that ignores it."""
    for word in dict.fromkeys(itertools.chain(*runs)):
        with_word = [config for run, config in zip(runs, configs, strict=True) if word in run]
        for option in sorted(set.union(*options_and_groups([word]))):
            for config in with_word:
                refuse_untaken(option, config)
            reasons = [why for config in with_word if (why := why_unread(option, config))]
            if reasons and (len(reasons) == len(with_word) or len(with_word) < len(runs)):
                raise UserError(f"{option}: {reasons[0]}")


def _labels(runs: list[list[str]]) -> list[str]:
    labels = (" ".join(word for word in run if not all(word in other for other in runs)) for run in runs)
    return [label or "the run" for label in labels]


def _check_folder(hydra: DictConfig, name: str) -> None:
    """Refuse a folder name that an option's value makes empty, invalid or a path with `..`."""
    try:
        folder = OmegaConf.select(hydra, name)
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.{name}: {message_of(error)}") from error
    if folder in (None, "") or ".." in Path(str(folder)).parts or "\0" in str(folder):
        takes = "a folder below this one, or an absolute path, without '..'"
        raise UserError(f"hydra.{name}: got {str(folder)[:100]!r}, takes {takes}")
    if why := folder_error(str(folder)):
        raise UserError(f"hydra.{name}: got {str(folder)[:100]!r}: {why}")
