"""The compositions of train.yaml by Hydra, and their cache.

The runs of a sweep differ in options and seldom in choices. Reading and merging YAML files takes most of the time and
depends on the choices alone, so a process composes the same choices once, and sets options in copies.
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

_SET_LATE = ("hydra.run.", "hydra.sweep.")  # of Hydra's section; the rest of it may decide how files are composed


def compose(overrides: list[str]) -> DictConfig:
    """The configuration of a command line without several values, Hydra's section included, as Hydra composes it.

    Hydra has to be initialized with the installed configs.

    Raises:
        UserError: for a text that cannot be parsed.
        HydraException, OmegaConfBaseException, YAMLError, …: as Hydra raises them.
    """
    parsed = parse(overrides)
    early = [text_of(one) for one in parsed if _is_early(one)]
    config = pickle.loads(_pickled(tuple(early), config_dir()))
    _hydra.set_options(config, [one for one in parsed if not _is_early(one)], parsed)
    return config


def search_path() -> list[str]:
    """The override by which Hydra finds the YAML files of `--config-dir`; none without that flag."""
    folder = config_dir()
    return [] if folder is None else [f"hydra.searchpath=[{quoted(f'file://{folder}')}]"]


def _is_early(one: Override) -> bool:
    """Whether an override may decide which files are composed; `data={batch_size: 8}` sets options."""
    key = one.key_or_group
    if key.startswith("hydra."):
        return not key.startswith(_SET_LATE)
    is_new = "." not in key and (one.is_add() or one.is_force_add())
    return is_new or (chooses(one) and not isinstance(one.value(), dict))


@functools.lru_cache(maxsize=256)
def _pickled(choices: tuple[str, ...], folder: Path | None) -> bytes:
    """The configuration of these choices, with the YAML files of a folder; OmegaConf copies five times slower."""
    return pickle.dumps(hydra_compose("train", [*choices, *search_path()], return_hydra_config=True))
