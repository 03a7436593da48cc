"""All uses of Hydra's private names, as of hydra-core 1.3.8. The rest of the package uses only public names."""

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
    """Apply an override to a configuration; HydraException or OmegaConfBaseException if that is impossible."""
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except TypeError as error:  # from OmegaConf, if the index into a list is not a number
        raise HydraException(str(error)) from error


def complete_hydra_section(config: DictConfig, overrides: list[Override]) -> None:
    """Set the overrides and the working directory in Hydra's section, as Hydra does at the end of a composition."""
    hydra = config.hydra
    task_overrides = [override for override in overrides if not override.is_hydra_override()]
    hydra.overrides.task = [override.input_line for override in task_overrides]
    hydra.overrides.hydra = [override.input_line for override in overrides if override.is_hydra_override()]
    hydra.job.override_dirname = get_overrides_dirname(task_overrides, **hydra.job.config.override_dirname)
    hydra.runtime.cwd = os.getcwd()


def multirun(configs: Path, overrides: list[str], job: Callable[[DictConfig], Any]) -> None:
    """Have Hydra's sweeper and launcher compose the configuration of each run, and call `job` with it.

    Args:
        configs: the folder of `train.yaml`.
        overrides: the words of the command line, without flags.
        job: a function that gets a run's configuration, and is called in this process or in another one.
    """
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)  # INFO names each run
    with initialize_config_dir(str(configs), version_base="1.3"):
        hydra: Any = GlobalHydra.instance().hydra
        hydra.multirun("train", job, overrides)
