"""The words `option=value` of the commands that read a checkpoint."""

import os
from collections.abc import Collection, Mapping
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
        UserError: as `_take_own`, for a `ckpt` that is no file, and for an option that is missing.
    """
    parser = command_parser(name, description)
    words = f"{', '.join(f'{key}=' for key in own)}, then options to change"
    parser.add_argument("words", nargs="*", metavar="option=value", help=words)
    args = parser.parse_intermixed_args()
    given, overrides = _take_own(args.words, own)
    for key, example in own.items():
        if example and key not in given:
            raise UserError(f"{key}: is missing; write {key}={example}")
    if "ckpt" in given:
        refuse_missing("ckpt", Path(given["ckpt"]))
    return given, overrides


def _take_own(words: list[str], own: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The command's own options among the words, and the rest, which change the run's configuration.

    Raises:
        UserError: for an option that is given twice or has no value, and for a word that is nearly one of them.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, is_option, value = word.partition("=")
        if not is_option:
            instead = f"; write ckpt={word}" if "ckpt" in own and os.path.exists(word) else ""
            raise UserError(f"{word}: takes option=value{instead}")
        if key not in own:
            if "." not in key and (near := did_you_mean(key, own)):
                raise UserError(f"{key}: no such option.{near}")
            rest.append(word)
        elif key in given or not value:
            raise UserError(f"{key}: {'is given twice' if key in given else 'takes a value'}")
        else:
            given[key] = value
    return given, rest


def refuse_missing(option: str, path: Path) -> None:
    """Raise UserError for a path that is no file, with a checkpoint that may be meant."""
    if os.path.isfile(path):  # which raises nothing, also for a name that no file can have
        return
    place = newest(option) if str(path) == "last" and not os.path.exists(path) else path  # as resume=last names it
    patterns = ("*.ckpt", "checkpoints/*.ckpt", "*/checkpoints/*.ckpt")
    places = [*((place, pattern) for pattern in patterns), (path.parent, "*.ckpt")]
    found = [folder / file for folder, pattern in places for file in sorted(glob(pattern, root_dir=folder))]
    hint = f"; write {option}={found[0]}" if found else ""
    raise UserError(f"{option}: got '{path}', which is not a file{hint}")
