"""Parses the words of a command line, flags and options in any order, and prints the help of `batchscope train`."""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from glob import glob
from pathlib import Path

from omegaconf import OmegaConf

from .._system import command_line
from ..checkpointing.resume import newest_run_folder
from ..errors import UserError, did_you_mean
from ..options.compose import compose, compose_command_line, without_hydra
from ..options.groups import GROUPS, choices_of, to_plain
from ..options.habits import answer_to
from ..options.hints import resolving
from ..options.overrides import as_override
from ..options.purpose import TOP_LEVEL
from ..options.trainer import TRAINER
from ..options.tree import flatten
from ..records.terminal import be_verbose
from . import command_parser

CKPT = "outputs/runs/<run>/checkpoints/best.ckpt"  # an example
_DESCRIPTION = """Train a model and measure every step.

    batchscope train model=cnn data.batch_size=512     one run
    batchscope train -m data.batch_size=64,128,256     a sweep: one run a value
    batchscope train resume=<run folder>               resume a run"""


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `batchscope train`; its `overrides` are the words that are no flags."""
    flags = command_parser("train", _DESCRIPTION, add_help=False)
    flags.add_argument("overrides", nargs="*", metavar="option=value", help="what to change of the configuration below")
    flags.add_argument("-m", "--multirun", action="store_true", help="run each combination of option=value,value")
    flags.add_argument("-v", "--verbose", action="store_true", help="print the details of each run")
    flags.add_argument("--cfg", choices=("job",), help="print the configuration instead of running it")
    flags.add_argument("-h", "--help", action="store_true", help="print this help")
    return flags


def parse_arguments() -> argparse.Namespace:
    """Parse `sys.argv` into flags and `overrides`.

    Raises:
        UserError: for a flag that does not exist, or that excludes another one.
    """
    flags = _parser()
    args, unknown = flags.parse_known_intermixed_args(sys.argv[1:])
    if unknown:
        raise UserError(_hint_for_unknown_flag(unknown[0], flags.format_help()), exit_code=2)
    if args.cfg and args.multirun:
        raise UserError("--multirun and --cfg: only one of them at a time", exit_code=2)
    words = (re.sub(r"^\+{1,2}resume=", "resume=", word) for word in args.overrides)
    args.overrides = [word for word in words if word != "resume=null"]  # the default
    if args.verbose:
        be_verbose()
    return args


def _hint_for_unknown_flag(word: str, help_text: str) -> str:
    """Return the error for an unknown flag, with what to write: many programs take options with dashes in front."""
    flag, _, value = word.lstrip("-").partition("=")
    name = flag.replace("-", "_")
    if name not in (*GROUPS, *TOP_LEVEL):  # batch_size is data.batch_size
        options = [option for option, _ in flatten(to_plain(without_hydra(compose([]))))]
        options += [f"trainer.{option}" for option in TRAINER]  # which no YAML file lists
        name = next((option for option in options if option.endswith(f".{name}")), name)
        if "." not in name:
            instead = answer_to(name, value) or answer_to(f"trainer.{name}", value)
            near = did_you_mean(f"--{flag}", re.findall(r"--[a-z-]+", help_text), cutoff=0.7)  # all share the dashes
            return f"{word}: no such flag.{f' {name}: {instead}' if instead else near}"
    return f"{word}: no such flag. Options are written without dashes: {command_line([f'{name}={value}']) if value else f'{name}=<value>'}"


def show(args: argparse.Namespace) -> None:
    """Print the help or the configuration of a command line. Raises UserError for one that cannot be composed."""
    if not args.help and not args.multirun:
        if any(word.startswith("resume=") for word in args.overrides):
            raise UserError("--cfg: the configuration of a run that is resumed is in its run.json")
        compose_command_line(args.overrides, False)
    config = without_hydra(compose(args.overrides))
    with resolving("config"):
        text = OmegaConf.to_yaml(config)
    if args.help:
        print(_parser().format_help())
        print("choices, group=choice:")
        for group in (*GROUPS, "hydra/launcher", "hydra/sweeper"):
            if group != "hydra" and (names := choices_of(group)):
                print(f"  {group}: {', '.join(names)}")
        print("\noptions; trainer.max_epochs=3 sets max_epochs of trainer:\n")
    print(text, end="")


def parse_words(name: str, description: str | None, keys: Mapping[str, str | None]) -> tuple[dict[str, str], list[str]]:
    """Parse the command line of `batchscope <name>` into the command's options and overrides of the run's configuration.

    Args:
        name: the name of the command.
        description: the text of its help.
        keys: the command's own options, each with an example if it is required, else with None.

    Raises:
        UserError: for a required option that is missing, one that is given twice or has no value, a word that is no
            option or a misspelled one of the command, and a `ckpt` that is no file.
    """
    parser = command_parser(name, description)
    help_text = f"{', '.join(f'{key}=' for key in keys)}, then options to change"
    parser.add_argument("words", nargs="*", metavar="option=value", help=help_text)
    values: dict[str, str] = {}
    overrides = []
    words = parser.parse_intermixed_args().words
    for word in words:
        key, is_option, value = word.lstrip("+").partition("=")
        if not is_option and not word.startswith("~"):
            typed = {other.partition("=")[0] for other in words}
            missing = [key for key, example in keys.items() if (example or key == "ckpt") and key not in typed]
            is_file = missing and os.path.exists(word)
            instead = f"; write {command_line([f'{missing[0]}={word}'])}" if is_file else ""
            raise UserError(f"{word}: takes option=value{instead}")
        if key in keys and (key in values or not value):
            raise UserError(f"{key}: {'is given twice' if key in values else 'takes a value'}")
        if key in keys:
            values[key] = value
        elif "." not in key and (near := did_you_mean(key, keys)):
            raise UserError(f"{key}: no such option.{near}")
        else:
            overrides.append(word)
    for key, example in keys.items():
        if example and key not in values:
            raise UserError(f"{key}: is missing; write {key}={example}")
    if "ckpt" in values:
        refuse_missing("ckpt", Path(values["ckpt"]))
    return values, overrides


def refuse_missing(option: str, path: Path) -> None:
    """Raise UserError for a path that is no file, and suggest a checkpoint near it."""
    if os.path.isfile(path):  # no exception, even for an impossible name
        return
    is_newest = str(path) == "last" and not os.path.exists(path)  # as resume=last names it
    root = newest_run_folder(option) if is_newest else path
    patterns = ("*.ckpt", "checkpoints/*.ckpt", "*/checkpoints/*.ckpt")
    searches = [*((root, pattern) for pattern in patterns), (path.parent, "*.ckpt")]
    files = [folder / file for folder, pattern in searches for file in sorted(glob(pattern, root_dir=folder))]
    words = [as_override(option, str(file)) if option == "init" else f"{option}={file}" for file in files[:1]]
    hint = f"; write {command_line(words)}" if files else ""
    raise UserError(f"{option}: got '{path}', which is not a file{hint}")
