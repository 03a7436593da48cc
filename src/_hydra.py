"""What is private in Hydra, in one place. Read in hydra-core 1.3.8; the rest of the package uses public names only."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.utils import _locate
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig


def locate(target: str) -> Any:
    """What a dotted name means: a class, a function, a module. ImportError, with its cause, where nothing is found."""
    return _locate(target)


def apply_override(override: Override, config: DictConfig) -> None:
    """Change a configuration as an override says; HydraException or OmegaConfBaseException if that is impossible."""
    _apply([override], config)


def _apply(overrides: list[Override], config: DictConfig) -> None:
    try:
        ConfigLoaderImpl._apply_overrides_to_config(overrides, config)
    except TypeError as error:  # OmegaConf's, for an item of a list that is no number
        raise HydraException(str(error)) from error


def set_options(config: DictConfig, options: list[Override], overrides: list[Override]) -> None:
    """Finish a configuration that was composed of its choices alone, as Hydra finishes a composition.

    Args:
        config: composed with Hydra's section; it is changed.
        options: the overrides that set options; the others are choices.
        overrides: all overrides of the command line.

    Raises:
        HydraException or OmegaConfBaseException: if an option cannot be set.
    """
    _apply(options, config)
    hydra = config.hydra
    of_run = [one for one in overrides if not one.is_hydra_override()]
    hydra.overrides.task = [one.input_line for one in of_run]
    hydra.overrides.hydra = [one.input_line for one in overrides if one.is_hydra_override()]
    hydra.job.override_dirname = get_overrides_dirname(of_run, **hydra.job.config.override_dirname)
    hydra.runtime.cwd = os.getcwd()


def multirun(configs: Path, overrides: list[str], job: Callable[[DictConfig], Any]) -> None:
    """Have Hydra's sweeper and launcher call a job for each run; they compose its configuration.

    Args:
        configs: the folder of `train.yaml`.
        overrides: the words of the command line, without flags.
        job: called with a run's configuration, in this process or another one.
    """
    quiet_launcher()
    with initialize_config_dir(str(configs), version_base="1.3"):
        _initialized().multirun("train", job, overrides)


def complete(configs: Path, words: list[str]) -> None:
    """Print what a shell asks for: `install=bash`, `uninstall=bash`, or the answer to `query=bash` (see `COMP_LINE`)."""
    with initialize_config_dir(str(configs), version_base="1.3"):
        _initialized().shell_completion("train", words)


def quiet_launcher() -> None:
    """Keep the basic launcher from announcing each run of a sweep."""
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)


def _initialized() -> Any:
    return GlobalHydra.instance().hydra
