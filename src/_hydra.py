"""What is private in Hydra, in one place. Read in hydra-core 1.3.8; the rest of the package uses public names only."""

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig


def args_parser() -> argparse.ArgumentParser:
    """The parser of Hydra's flags; the words that are no flags are its `overrides`."""
    return get_args_parser()


def apply_override(override: Override, config: DictConfig) -> None:
    """Change a configuration as an override says; HydraException or OmegaConfBaseException if that is impossible."""
    ConfigLoaderImpl._apply_overrides_to_config([override], config)


def set_options(config: DictConfig, options: list[Override], overrides: list[Override]) -> None:
    """Finish a configuration that was composed of its choices alone, as Hydra finishes a composition.

    Args:
        config: composed with Hydra's section; it is changed.
        options: the overrides that set options; the others are choices.
        overrides: all overrides of the command line.

    Raises:
        HydraException or OmegaConfBaseException: if an option cannot be set.
    """
    ConfigLoaderImpl._apply_overrides_to_config(options, config)
    hydra = config.hydra
    of_run = [one for one in overrides if not one.is_hydra_override()]
    hydra.overrides.task = [one.input_line for one in of_run]
    hydra.overrides.hydra = [one.input_line for one in overrides if one.is_hydra_override()]
    hydra.job.override_dirname = get_overrides_dirname(of_run, **hydra.job.config.override_dirname)
    hydra.runtime.cwd = os.getcwd()


def runs_of_sweep(overrides: list[Override]) -> list[list[str]]:
    """The overrides of each run that the basic sweeper would start. Hydra has to be initialized."""
    for override in overrides:
        override.config_loader = GlobalHydra.instance().config_loader()  # it knows the choices that glob(*) names
    batches = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [list(run) for batch in batches for run in batch]


@contextlib.contextmanager
def composed_by(compose: Callable[[list[str]], DictConfig]) -> Iterator[None]:
    """Have hydra.main and its sweepers take the configuration of each run from `compose(overrides)`.

    `compose` may itself call Hydra's public `compose`.
    """
    compose_anew = ConfigLoaderImpl.load_configuration

    def load(
        self: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,  # False in Hydra's public `compose`
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if from_shell and run_mode is RunMode.RUN:
            return compose(overrides)
        return compose_anew(self, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    ConfigLoaderImpl.load_configuration = load
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = compose_anew


def take_mode_from_flags() -> None:
    """Keep hydra.main from composing a configuration only to read `hydra.mode`: `--multirun` alone decides."""
    Hydra.get_mode = lambda *_, **__: None


def quiet_launcher() -> None:
    """Keep the basic launcher from announcing each run of a sweep."""
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)
