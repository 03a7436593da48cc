"""What is private in Hydra, in one place. Read in hydra-core 1.3.8; the rest of the package uses public names only."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig


def apply_override(override: Override, config: DictConfig) -> None:
    """Change a configuration as an override says; HydraException or OmegaConfBaseException if that is impossible."""
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except TypeError as error:  # OmegaConf's, for an item of a list that is no number
        raise HydraException(str(error)) from error


def complete_hydra_section(config: DictConfig, overrides: list[Override]) -> None:
    """Write into Hydra's section what Hydra writes at the end of a composition: the overrides, and the working directory."""
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
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)  # it names each run
    with initialize_config_dir(str(configs), version_base="1.3"):
        hydra: Any = GlobalHydra.instance().hydra
        hydra.multirun("train", job, overrides)
