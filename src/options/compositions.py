"""Hydra's compositions of train.yaml; a process composes the same choices of groups once and then sets options in copies.

A command line is composed several times: to be checked, by hydra.main for each run, and to explain a mistake. Most of the
time goes into reading and merging YAML files, which depends on the choices alone.
"""

import functools
import pickle
from pathlib import Path

from hydra import compose as hydra_compose
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from .. import _hydra
from .explain import chooses
from .groups import config_dir
from .overrides import parse, quoted, text_of

_SET_LATE = ("hydra.run.", "hydra.sweep.", "hydra.mode")  # of the section hydra: Hydra reads them after all files


def compose(overrides: list[str]) -> DictConfig:
    """The configuration of a command line without several values, Hydra's section included, as Hydra composes it.

    Hydra has to be initialized with the installed configs.

    Raises:
        UserError: for a text that cannot be parsed.
        HydraException, OmegaConfBaseException, YAMLError, …: as Hydra raises them.
    """
    parsed = parse(overrides)
    choices = [one for one in parsed if chooses(one)]
    options = [one for one in parsed if not chooses(one)]
    if any(map(_may_change_files, choices)) or any(map(_may_be_read_early, options)):
        return _compose_anew(overrides)
    config = pickle.loads(_pickled(tuple(map(text_of, choices)), config_dir()))
    _hydra.set_options(config, options, parsed)
    return config


def _may_change_files(choice: Override) -> bool:
    """Whether a choice adds YAML files of the user's, or sets an option after all: `data={batch_size: 8}`."""
    return choice.key_or_group == "hydra.searchpath" or isinstance(choice.value(), dict)


def _may_be_read_early(option: Override) -> bool:
    """Whether an option may choose in a plugin's group, or decide what Hydra does before it sets options."""
    key = option.key_or_group
    if key.startswith("hydra."):
        return not key.startswith(_SET_LATE)
    return "." not in key and (option.is_add() or option.is_force_add())


@functools.lru_cache(maxsize=256)
def _pickled(choices: tuple[str, ...], folder: Path | None) -> bytes:
    """The configuration of these choices, with the YAML files of a folder; OmegaConf copies five times slower."""
    return pickle.dumps(_compose_anew(list(choices)))


def _compose_anew(overrides: list[str]) -> DictConfig:
    folder = config_dir()
    search_path = [] if folder is None else [f"hydra.searchpath=[{quoted(f'file://{folder}')}]"]
    return hydra_compose("train", [*overrides, *search_path], return_hydra_config=True)
