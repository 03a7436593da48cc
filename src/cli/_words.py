"""The words `option=value` of the commands that read a checkpoint."""

import os
from collections.abc import Mapping
from glob import glob
from pathlib import Path

from ..checkpointing.resume import newest
from ..errors import UserError, did_you_mean
from . import command_parser

CKPT = "outputs/runs/<run>/checkpoints/best.ckpt"  # an example


def parse_words(name: str, description: str | None, own: Mapping[str, str | None]) -> tuple[dict[str, str], list[str]]:
    """The command line of `batchscope <name>`: its own options, and those that change the run's configuration.

    Args:
        name: of the command.
        description: for its help.
        own: its options, each with an example where it has to be given, else with None.

    Raises:
        UserError: for an option that is missing, is given twice or has no value, a word that is no option or nearly one
            of the command's own, and a `ckpt` that is no file.
    """
    parser = command_parser(name, description)
    words = f"{', '.join(f'{key}=' for key in own)}, then options to change"
    parser.add_argument("words", nargs="*", metavar="option=value", help=words)
    given: dict[str, str] = {}
    overrides = []
    for word in parser.parse_intermixed_args().words:
        key, is_option, value = word.partition("=")
        if not is_option:
            instead = f"; write ckpt={word}" if "ckpt" in own and os.path.exists(word) else ""
            raise UserError(f"{word}: takes option=value{instead}")
        if key in own and (key in given or not value):
            raise UserError(f"{key}: {'is given twice' if key in given else 'takes a value'}")
        if key in own:
            given[key] = value
        elif "." not in key and (near := did_you_mean(key, own)):
            raise UserError(f"{key}: no such option.{near}")
        else:
            overrides.append(word)
    for key, example in own.items():
        if example and key not in given:
            raise UserError(f"{key}: is missing; write {key}={example}")
    if "ckpt" in given:
        refuse_missing("ckpt", Path(given["ckpt"]))
    return given, overrides


def refuse_missing(option: str, path: Path) -> None:
    """Raise UserError for a path that is no file, with a checkpoint that may be meant."""
    if os.path.isfile(path):  # which raises nothing, also for a name that no file can have
        return
    place = newest(option) if str(path) == "last" and not os.path.exists(path) else path  # as resume=last names it
    patterns = ("*.ckpt", "checkpoints/*.ckpt", "*/checkpoints/*.ckpt")
    places = [*((place, pattern) for pattern in patterns), (path.parent, "*.ckpt")]
    near = [folder / file for folder, pattern in places for file in sorted(glob(pattern, root_dir=folder))]
    hint = f"; write {option}={near[0]}" if near else ""
    raise UserError(f"{option}: got '{path}', which is not a file{hint}")
