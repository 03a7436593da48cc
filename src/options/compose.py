"""From a command line to the runs that it asks for: Hydra composes each of them once, and each is checked."""

import functools
import os
import re
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from .. import _hydra
from ..errors import UserError
from .check import check_config, check_targets
from .compositions import compose
from .explain import chooses, first_line, missing_choice, wrong_choice, wrong_key
from .groups import CONFIGS, GROUPS, load, to_plain
from .overrides import combinations, parse, refuse_several_values, text_of

# The launchers of configs/hydra/launcher describe every option of their plugins and are validated by their names.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

_LONGEST_NAME = 255  # bytes; of a file or folder, on the file systems in use
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)
_SEVERAL = "; write batchscope train -m … to run each of them"
# Options of Hydra's that change where a run works or what runs beside it, and what to write instead.
_NOT_TAKEN = {
    "callbacks": "callbacks.<name> takes callbacks of Lightning",
    "job.chdir": "a run stays in the working directory",
    "output_subdir": "run.json holds the configuration",
}


@dataclass(frozen=True)
class CommandLine:
    """The runs that a command line asks for."""

    configs: list[dict[str, Any]]  # checked, one for each run
    compositions: list[DictConfig]  # the same as Hydra composed them, with its own section
    folder: Path  # of the run, or of the sweep
    folder_chosen: bool  # whether a command line or a config names the folder; otherwise it is named by the time
    # For each run of a sweep, the overrides that set it apart; empty if a sweeper that searches decides them.
    labels: list[str] = field(default_factory=list)
    launcher: dict[str, Any] = field(
        default_factory=dict
    )  # the options of Hydra's launcher, which starts a sweep's runs


def compose_command_line(overrides: list[str], multirun: bool) -> CommandLine:
    """Compose and check every run that a command line asks for.

    Args:
        overrides: the words of `batchscope train`, without flags.
        multirun: whether a value may be a list to sweep over.

    Raises:
        UserError: at the first mistake; nothing has been written by then.
    """
    parsed = parse(overrides)
    if not multirun:
        refuse_several_values(parsed, _SEVERAL)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        base = _compose(_fixed(parsed))
        runs = _runs_of_sweep(parsed, base) if multirun else []
        composed = [_compose(run) for run in runs] if multirun else [base]
    for composition in composed:
        _check_hydra(composition, multirun)
    hydra, kind = base.hydra, "sweep" if multirun else "run"
    folder, chosen = Path(hydra[kind].dir), to_plain(hydra[kind])["dir"] != _named_by_time(kind)
    configs = [check_config(without_hydra(composition)) for composition in composed]
    for config in configs:
        check_targets(config)
    line = CommandLine(configs, composed, folder, chosen)
    if not multirun:
        return line
    is_list = hydra.sweeper._target_.endswith(".BasicSweeper")
    return replace(line, labels=_labels(runs) if is_list else [], launcher=to_plain(hydra.launcher, resolve=True))


def check_command_line(overrides: list[str], multirun: bool, run_dir: str | None = None) -> list[dict[str, Any]]:
    """The checked configurations alone of `compose_command_line`, those of runs in `run_dir` where it is given."""
    line = compose_command_line(overrides, multirun)
    return line.configs if run_dir is None else [config_in(run_dir, one) for one in line.compositions]


def config_in(run_dir: str | os.PathLike[str], composition: DictConfig) -> dict[str, Any]:
    """The checked configuration of a run whose folder is known."""
    config = without_hydra(composition)
    config.run_dir = os.fspath(run_dir)
    return check_config(config)


def without_hydra(composition: DictConfig) -> DictConfig:
    """A composition as its run sees it: a copy without Hydra's section."""
    return OmegaConf.masked_copy(composition, [key for key in composition if key != "hydra"])


def compose_to_show(overrides: list[str]) -> DictConfig:
    """The composition of a configuration that is only shown: its values may be wrong. Raises UserError."""
    refuse_several_values(parse(overrides), _SEVERAL)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return _compose(overrides)


def apply_overrides(config: dict[str, Any], overrides: list[str]) -> DictConfig:
    """Change a configuration that was composed earlier: `option=value`, `+`, `++`, `~`, `group=choice`, as a new run.

    Raises:
        UserError: for a text that cannot be parsed, an unknown option or an unknown choice.
    """
    parsed = parse(overrides)
    refuse_several_values(parsed, hint="")
    changed = OmegaConf.create(config)
    OmegaConf.set_struct(changed, True)
    for one in parsed:
        if re.split("[./]", one.key_or_group)[0] in ("experiment", "debug", "hydra"):
            raise UserError(
                f"{one.key_or_group}: is for a new run; here, name the options to change: data.batch_size=8"
            )
        if one.key_or_group in GROUPS:
            _choose(changed, one)
            continue
        before = to_plain(changed)
        try:
            _hydra.apply_override(one, changed)
        except (HydraException, OmegaConfBaseException) as error:
            raise wrong_key(before, one) or UserError(f"{one.input_line}: {first_line(error)}") from error
    return changed


def _choose(config: DictConfig, one: Override) -> None:
    """Take another choice of a config group: `data=mnist`; `logger=null` and `~logger` leave a collection out."""
    chosen = None
    if not one.is_delete():
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            chosen = _compose([text_of(one)]).get(one.key_or_group)
    with open_dict(config):
        config[one.key_or_group] = chosen


def _compose(overrides: list[str]) -> DictConfig:
    try:
        return compose(overrides)
    except MissingConfigException as error:
        raise missing_choice(error) from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        raise UserError(f"{where}: {getattr(error, 'problem', None) or first_line(error)}") from error
    except RecursionError as error:
        raise UserError("a YAML file or an option has too many levels") from error
    except _HYDRA_ERRORS as error:
        raise _explain(overrides, error) from error


def _explain(overrides: list[str], error: Exception) -> UserError:
    """Find the override that Hydra refuses, and say what it may have been meant to be."""
    parsed = parse(overrides)
    if wrong := wrong_choice(parsed):
        return wrong
    try:
        base = to_plain(compose([text_of(one) for one in parsed if chooses(one)]))
    except _HYDRA_ERRORS:
        return UserError(first_line(error))
    found = (wrong_key(base, one) for one in parsed if one.key_or_group not in GROUPS)
    return next(filter(None, found), None) or UserError(first_line(error))


def _fixed(parsed: list[Override]) -> list[str]:
    return [text_of(one) for one in parsed if not one.is_sweep_override()]


@functools.cache
def _named_by_time(kind: str) -> str:
    """The folder of a run or a sweep that no option names, before its time is filled in."""
    return load(CONFIGS / "hydra" / "default.yaml")[kind]["dir"]


def _runs_of_sweep(parsed: list[Override], base: DictConfig) -> list[list[str]]:
    """The overrides of each run of a sweep; a search decides its values later, so its ranges are left out."""
    if any(one.is_sweep_override() and not one.is_discrete_sweep() for one in parsed):
        return [_fixed(parsed)]
    from_file = [f"{key}={value}" for key, value in (base.hydra.sweeper.get("params") or {}).items()]
    return combinations([*from_file, *map(text_of, parsed)])


def _labels(runs: list[list[str]]) -> list[str]:
    labels = (" ".join(word for word in run if not all(word in other for other in runs)) for run in runs)
    return [label or "the run" for label in labels]


def _check_hydra(config: DictConfig, multirun: bool) -> None:
    """See that Hydra's section keeps the files of a run together."""
    mode = config.hydra.mode
    if mode not in (None, RunMode.MULTIRUN if multirun else RunMode.RUN):
        raise UserError(
            f"hydra.mode: got {mode.name}; write batchscope train -m … for several runs, without -m for one"
        )
    for name, instead in _NOT_TAKEN.items():
        if OmegaConf.select(config.hydra, name):
            raise UserError(f"hydra.{name}: is not taken: {instead}")
    if multirun:
        with open_dict(config):
            config.hydra.job.num = config.hydra.job.id = 0
    for name in ("sweep.dir", "sweep.subdir") if multirun else ("run.dir",):
        _check_folder(config.hydra, name)


def _check_folder(hydra: DictConfig, name: str) -> None:
    """Refuse a folder that an option's value leads somewhere else."""
    try:
        folder = OmegaConf.select(hydra, name)
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.{name}: {first_line(error)}") from error
    below_sweep = name == "sweep.subdir"
    path = Path(str(folder))
    if folder is None or ".." in path.parts or "\0" in str(folder) or (below_sweep and path.is_absolute()):
        takes = "a folder below the sweep's" if below_sweep else "a folder below this one, or an absolute path"
        raise UserError(f"hydra.{name}: got {str(folder)[:100]!r}, takes {takes}, without '..'")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise UserError(f"hydra.{name}: has a name of more than {_LONGEST_NAME} bytes in it: '{str(folder)[:60]}…'")
