"""From a command line to the runs that it asks for: Hydra composes each of them once, and each is checked."""

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
from .._system import why_no_folder
from ..errors import UserError
from .check import check_config, refuse_callbacks, refuse_untaken
from .groups import CONFIGS, GROUPS, OPTIONAL_GROUPS, SECTIONS, config_dir, load, refuse_unreadable, to_plain
from .hints import message_of, missing_choice, resolving, unknown_option
from .overrides import combinations, parse, quoted, set_by, text_of
from .purpose import lightning_module_of, own_rate, why_no_validation, why_unread
from .tree import TARGET, walk

# The launchers of configs/hydra/launcher describe every option of their plugins and are validated by their names.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

_RATE = "optimizer.lr"
_DECIMAL_COMMA = re.compile(r"=(-?0,\d+)$")
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)
_OF_FILES = (YAMLError, UnicodeError, GrammarParseError)  # which name no file, or a line that is not the wrong one
_EACH = "; write one command for each value"


@dataclass(frozen=True)
class CommandLine:
    """The runs that a command line asks for."""

    configs: list[dict[str, Any]]  # checked, one for each run
    compositions: list[DictConfig]  # the same as Hydra composed them, with its own section
    folder: Path  # of the run, or of the sweep
    folder_chosen: bool  # whether a command line or a config names the folder; otherwise it is named by the time
    words: list[str]  # of the command line, and of what a config sweeps over
    # For each run of a sweep, the overrides that set it apart; empty if a sweeper that searches decides them.
    labels: list[str]
    launcher: dict[str, Any]  # the options of Hydra's launcher, which starts a sweep's runs; empty of a single run


@resolving("hydra")
def compose_command_line(overrides: list[str], multirun: bool) -> CommandLine:
    """Compose and check every run that the words of `batchscope train`, without flags, ask for.

    With `multirun` a value may be a list to sweep over. UserError at the first mistake, before anything is written.
    """
    named = [word.partition("=")[2].strip("[]") for word in overrides if word.lstrip("+").startswith("experiment=")]
    if len(named) > 1:  # Hydra would take the last one
        raise UserError(f"experiment: is written {len(named)} times; write 'experiment=[{','.join(named)}]'")
    parsed = parse(overrides)
    base = compose(_fixed(parsed))
    if not multirun:  # a search takes no -m
        _refuse_several_values(
            parsed, _EACH if base.get("search") else f"{_EACH}, or batchscope train -m … for a sweep"
        )
    params = {str(key): str(value) for key, value in (base.hydra.sweeper.get("params") or {}).items() if multirun}
    plain = to_plain(without_hydra(base)) if _RATE in params else {}
    if _RATE in params and not base.get("test") and (why := why_no_validation(plain)):
        raise UserError(f"{_RATE}: a validation says which rate is the best, and {why}")
    # A config's sweep over the rate is one over the rate that a LightningModule reads.
    if lightning_module_of(plain) and (rate := own_rate(plain)):
        own_rates = params.pop(_RATE)
        typed = {word.lstrip("+").partition("=")[0] for word in overrides}
        params |= {} if rate in typed else {rate: own_rates}
        own = [*map("=".join, params.items()), "hydra.sweeper.params=null", *overrides]
        return compose_command_line(own, multirun)
    words = [*map("=".join, params.items()), *overrides]
    is_list = multirun and base.hydra.sweeper._target_.endswith(".BasicSweeper")
    runs = _runs_of_sweep(words, is_list) if multirun else [words]
    composed = [compose(run) for run in runs] if multirun else [base]
    hydra, kind = base.hydra, "sweep" if multirun else "run"
    by_time = load(CONFIGS / "hydra" / "default.yaml")[kind]["dir"]  # of a folder that no option names
    configs = []
    for composition in composed:
        with env_override(dict(composition.hydra.job.env_set)):  # which an option may name: ${oc.env:…}
            _check_folder(composition.hydra, f"{kind}.dir")
            configs.append(check_config(without_hydra(composition)))
        refuse_callbacks(configs[-1])
    if any(config["resume"] for config in configs):
        raise UserError("resume: is for the command line of one run alone: batchscope train resume=<run folder>")
    with env_override(dict(hydra.job.env_set)):
        folder, chosen = Path(hydra[kind].dir), to_plain(hydra[kind])["dir"] != by_time
    _refuse_unread(runs if len(runs) > 1 else [words], configs)
    labels = _labels(runs) if is_list else []
    launcher = to_plain(hydra.launcher, resolve=True) if multirun else {}
    to_plain(hydra.sweeper, resolve=multirun)  # as Hydra will
    words = [*words, *(["hydra.sweeper.params=null"] if params else [])]  # they are words now
    return CommandLine(configs, composed, folder, chosen, words, labels, launcher)


def check_command_line(overrides: list[str], multirun: bool) -> list[dict[str, Any]]:
    """The checked configurations alone of `compose_command_line`."""
    return compose_command_line(overrides, multirun).configs


def choices_in(hydra: Any) -> dict[str, str]:
    """The choice of each group, from Hydra's section of a composition, as `choices_after`."""
    return choices_after(hydra.runtime.choices, list(hydra.overrides.task))


def choices_after(choices: Mapping[str, Any], overrides: list[str]) -> dict[str, str]:
    """The choice of each group that has one, changed by a command line; none where an option replaces the choice's class."""
    chosen = {one.key_or_group: one.value() for one in parse(overrides) if _chooses(one)}
    chosen = {group: choice for group, choice in chosen.items() if group in SECTIONS}
    typed = set_by(overrides)[0]
    return {k: str(v) for k, v in {**choices, **chosen}.items() if v is not None and f"{k}.{TARGET}" not in typed}


def without_hydra(composition: DictConfig) -> DictConfig:
    """A composition as its run sees it: a copy without Hydra's section."""
    return OmegaConf.masked_copy(composition, [key for key in composition if key != "hydra"])


def apply_overrides(config: dict[str, Any], overrides: list[str]) -> DictConfig:
    """Change a configuration that was composed earlier as a new run; UserError for an unknown option or choice."""
    parsed = parse(overrides)
    _refuse_several_values(parsed, hint="")
    changed = OmegaConf.create(config)
    OmegaConf.set_struct(changed, True)
    for one in sorted(parsed, key=lambda one: not _chooses(one)):  # a choice replaces options of its section
        if "/" in one.key_or_group or one.key_or_group.partition(".")[0] in (*OPTIONAL_GROUPS, "hydra"):
            raise UserError(
                f"{one.key_or_group}: is for a new run; here, name the options to change: trainer.accelerator=cpu"
            )
        if one.key_or_group not in GROUPS or not _chooses(one):
            _set_option(changed, one)
            continue
        chosen = None if one.is_delete() else compose([text_of(one)]).get(one.key_or_group)
        if one.key_or_group == "trainer" and chosen and changed.trainer:
            chosen = _on_devices_of(chosen, changed.trainer)
        with open_dict(changed):
            changed[one.key_or_group] = chosen
    _refuse_unread([overrides], [to_plain(changed)])
    return changed


def _on_devices_of(chosen: DictConfig, trainer: DictConfig) -> dict[str, Any]:
    """A trainer on the devices of a choice, with what else the choice has in place of the default one's options."""
    default, names = to_plain(compose([]).trainer), ("accelerator", "devices", "num_nodes", "strategy")
    differs = {k: v for k, v in to_plain(chosen).items() if k in names or (k, v) not in default.items()}
    return to_plain(trainer) | differs


def compose(overrides: list[str]) -> DictConfig:
    """The configuration of train.yaml with overrides, Hydra's section too; UserError for what Hydra cannot compose.

    Reading and merging YAML files takes most of the time, and depends on the choices alone: a process composes these
    once, and sets the options of a sweep's runs in copies.
    """
    parsed = parse(overrides)
    _refuse_several_values(parsed, _EACH)
    try:
        pickled = composed(tuple(text_of(one) for one in parsed if _chooses(one)), config_dir())
    except MissingConfigException as error:
        raise missing_choice(error) from error
    except RecursionError as error:
        raise UserError("a YAML file or an option has too many levels") from error
    except (*_HYDRA_ERRORS, YAMLError) as error:
        inner = error if str(error) else error.__cause__ or error  # what Hydra wraps in an error without words
        if isinstance(inner, _OF_FILES):
            refuse_unreadable()
        raise UserError(message_of(inner)) from error
    config = pickle.loads(pickled)
    for one in parsed:
        if not _chooses(one):
            _set_option(config, one)
    _hydra.complete_hydra_section(config, parsed)
    return config


def words_for_hydra(words: list[str]) -> list[str]:
    """Words of a sweep as Hydra takes them: `++` stands before an option that not every run has listed, as in `_set_option`."""
    parsed = parse(words)
    runs = combinations([text_of(one) for one in parsed if _chooses(one) and not one.is_interval_sweep()])
    nodes = ([*walk(to_plain(compose(run)))] for run in runs)
    listed = set.intersection(*({name for name, value in every if not isinstance(value, dict)} for every in nodes))

    def is_plain(one: Override) -> bool:
        is_known = one.key_or_group in listed or one.is_hydra_override() or _chooses(one)
        return is_known or one.get_key_element()[0] in "+~"

    return [text_of(one) if is_plain(one) else f"++{text_of(one)}" for one in parsed]


def search_path() -> list[str]:
    """The override by which Hydra finds the YAML files of `--config-dir`; none without that flag."""
    folder = config_dir()
    return [] if folder is None else [f"hydra.searchpath=[{quoted(f'file://{folder}')}]"]


@functools.lru_cache(maxsize=256)
def composed(choices: tuple[str, ...], folder: Path | None) -> bytes:
    """The pickled configuration of these choices, with a folder's YAML files; OmegaConf copies five times slower."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return pickle.dumps(hydra_compose("train", [*choices, *search_path()], return_hydra_config=True))


def _chooses(one: Override) -> bool:
    """Whether an override may decide which files are composed; `data={batch_size: 8}` sets options."""
    group = one.key_or_group
    if group.partition("/")[0] in GROUPS:
        return one.is_delete() or not isinstance(one.value(), dict)
    return one.package is not None or ("." not in group and (one.is_add() or one.is_force_add()))


def _set_option(config: DictConfig, one: Override) -> None:
    """Set, add or delete an option. A section may get any: whether its class takes it, `check_config` knows."""
    key, text = one.key_or_group, text_of(one)
    try:
        if one.get_key_element()[0] not in "+~" and not key.startswith("hydra."):
            above = key.rpartition(".")[0]
            section = OmegaConf.select(config, above) if above else config
            is_section = isinstance(section, DictConfig | ListConfig) if above else key in {*config}  # or has no value
            makes_section = key.endswith(f".{TARGET}")  # trainer.strategy._target_=…, in place of a text
            if not (is_section or makes_section):
                raise unknown_option(to_plain(config), key, text.partition("=")[2])
            if not isinstance(section, ListConfig):
                (one,) = parse([f"++{text}"])
        _hydra.apply_override(one, config)
    except _HYDRA_ERRORS as error:
        is_null = not one.is_delete() and one.value() is None
        raise UserError(f"{key}: {'got null, takes a value' if is_null else message_of(error)}") from error


def _refuse_several_values(parsed: list[Override], hint: str) -> None:
    for one in parsed:
        if one.is_sweep_override():
            decimal = _DECIMAL_COMMA.search(text_of(one))
            point = f"; a decimal number has a point: {decimal[1].replace(',', '.')}" if decimal else ""
            raise UserError(f"{one.key_or_group}: got several values, takes one{hint}{point}")


def _fixed(parsed: list[Override]) -> list[str]:
    return [text_of(one) for one in parsed if not one.is_sweep_override()]


def _runs_of_sweep(words: list[str], is_list: bool) -> list[list[str]]:
    """The overrides of each run of a sweep; a search decides its values later, so its ranges are left out."""
    every = parse(words)
    ranges = [text_of(one) for one in every if one.is_sweep_override() and not one.is_discrete_sweep()]
    if ranges and is_list:
        raise UserError(f"{ranges[0]}: an interval is for a sweeper that searches; add hydra/sweeper=optuna")
    return [_fixed(every)] if ranges else combinations([*map(text_of, every)])


def _refuse_unread(runs: Sequence[list[str]], configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for the first word that no run reads, or that tells a run from others and is not read by it."""
    for word in dict.fromkeys(itertools.chain(*runs)):
        held = [config for run, config in zip(runs, configs, strict=True) if word in run]
        for option in sorted(set.union(*set_by([word]))):
            for config in held:
                refuse_untaken(option, config)
            said = [why for config in held if (why := why_unread(option, config))]
            if said and (len(said) == len(held) or len(held) < len(runs)):
                raise UserError(f"{option}: {said[0]}")


def _labels(runs: list[list[str]]) -> list[str]:
    labels = (" ".join(word for word in run if not all(word in other for other in runs)) for run in runs)
    return [label or "the run" for label in labels]


def _check_folder(hydra: DictConfig, name: str) -> None:
    """Refuse a folder that an option's value leads somewhere else."""
    try:
        folder = OmegaConf.select(hydra, name)
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.{name}: {message_of(error)}") from error
    if folder in (None, "") or ".." in Path(str(folder)).parts or "\0" in str(folder):
        takes = "a folder below this one, or an absolute path, without '..'"
        raise UserError(f"hydra.{name}: got {str(folder)[:100]!r}, takes {takes}")
    if why := why_no_folder(str(folder)):
        raise UserError(f"hydra.{name}: got {str(folder)[:100]!r}: {why}")
