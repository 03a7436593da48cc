"""The words of `batchscope train`: flags and options in any order, and what is wrong with them in one line."""

import argparse
import os
import re
import sys

from .. import _hydra
from ..errors import UserError, did_you_mean, refuse_in_one_line
from ..options.groups import GROUPS, use_config_dir
from ..options.habits import habit
from ..options.overrides import accept_null_groups
from ..options.purpose import TOP_LEVEL
from ..records.terminal import be_verbose

_REFUSED_FLAGS = {
    "config-path": "the configuration is this program's own; --config-dir=<folder> adds YAML files of yours to it",
    "config-name": "the configuration is always train.yaml; experiment=<name> lays another over it",
    "experimental-rerun": "a pickle can run code, and is not loaded; resume=<run folder> resumes a run",
}


def parse_arguments() -> argparse.Namespace:
    """The flags of the command line in `sys.argv`, and its options as `overrides`; `sys.argv` gets the flags first.

    Hydra and the processes that Lightning starts read `sys.argv` again, and accept no other order.

    Raises:
        UserError: for a flag that does not exist, or that this program does not take.
    """
    parser = _hydra.args_parser()
    parser.add_argument("--verbose", "-v", action="store_true", help="print the details of each run")
    refuse_in_one_line(parser)
    args, unknown = parser.parse_known_intermixed_args()
    if unknown:
        raise UserError(_unknown_flag(unknown[0], parser.format_usage()), exit_code=2)
    _check_flags(args)
    use_config_dir(args.config_dir)
    args.overrides = [re.sub(r"^\+{1,2}resume=", "resume=", word) for word in args.overrides]
    for word in args.overrides:
        name, _, value = word.lstrip("+").partition("=")
        if name == "run_dir" and (known := habit(name, value)):  # an option that the run sets, whatever is typed
            raise known
    if args.shell_completion:
        _check_completion(args.overrides)
    elif not is_resume(args):  # a folder to resume is a path as it is, not Hydra's grammar
        args.overrides = accept_null_groups(args.overrides)
    if args.verbose:  # Hydra does not know it
        be_verbose()
    own = ("overrides", "verbose")
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in vars(args).items() if name not in own]
    words = [flag if value is True else f"{flag}={value}" for flag, value in flags if value not in (None, False)]
    sys.argv[1:] = [*words, *args.overrides]
    return args


def is_resume(args: argparse.Namespace) -> bool:
    """Whether the command line names a run to resume."""
    return any(word.startswith("resume=") for word in args.overrides)


def is_for_show(args: argparse.Namespace) -> bool:
    """Whether the command line asks for help, the composed configuration and the like, and starts no run."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse the flags that this program does not take, and those that do not go together."""
    for flag, instead in _REFUSED_FLAGS.items():
        if getattr(args, flag.replace("-", "_")) is not None:
            raise UserError(f"--{flag}: {instead}")
    exclusive = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if getattr(args, name)]
    exclusive += ["--shell-completion"] if args.shell_completion else []
    if len(exclusive) > 1:
        raise UserError(f"{' and '.join(exclusive)}: only one of them at a time", exit_code=2)
    if args.resolve and not (args.cfg or args.help):
        raise UserError("--resolve: belongs to --cfg or --help", exit_code=2)
    if args.package and not args.cfg:
        raise UserError("--package: belongs to --cfg", exit_code=2)


def _check_completion(words: list[str]) -> None:
    """Hydra's own words after --shell-completion; `query` comes from the shell, with what has been typed so far."""
    command, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    known = command in ("install", "uninstall", "query") and shell in ("bash", "fish", "zsh")
    if not known or (command == "query" and "COMP_LINE" not in os.environ):
        raise UserError(
            "--shell-completion: takes install=bash, install=zsh, install=fish, or uninstall=…", exit_code=2
        )


def _unknown_flag(word: str, usage: str) -> str:
    """What to write instead of an unknown flag: many programs take options with dashes in front."""
    name, _, value = word.lstrip("-").partition("=")
    near = did_you_mean(f"--{name}", re.findall(r"--[a-z-]+", usage))
    if near and name not in (*GROUPS, *TOP_LEVEL):
        return f"{word}: no such flag.{near}"
    return f"{word}: no such flag. Options are written without dashes: {name}={value or '<value>'}"
