"""What `batchscope train --help` and `--cfg` print: the flags, the choices, the configuration."""

import argparse

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import UserError
from ..options.compose import compose, without_hydra
from ..options.explain import message_of
from ..options.groups import GROUPS, choices_of
from .arguments import parser

_PLUGINS = ("hydra/launcher", "hydra/sweeper")


def show(args: argparse.Namespace) -> None:
    """Print the help or the configuration of a command line. Raises UserError for one that cannot be composed."""
    composition = compose(args.overrides)
    config = composition if args.cfg == "all" else without_hydra(composition)
    if args.cfg == "hydra":
        config = OmegaConf.masked_copy(composition, "hydra")
    text = _yaml(config, args.resolve)
    if not args.help:
        print(text, end="")
        return
    print(parser().format_help())
    print("choices, group=choice:")
    for group in [one for one in (*GROUPS, *_PLUGINS) if one != "hydra" and choices_of(one)]:
        print(f"  {group}: {', '.join(choices_of(group))}")
    print(f"\noptions; trainer.max_epochs=3 sets max_epochs of trainer:\n\n{text}", end="")


def _yaml(config: DictConfig, resolve: bool) -> str:
    try:
        return OmegaConf.to_yaml(config, resolve=resolve)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {message_of(error)}") from error
