"""The words `option=value` of the commands that read a checkpoint."""

from collections.abc import Collection
from pathlib import Path

from ..errors import UserError, did_you_mean
from ..options.groups import use_config_dir
from . import add_config_dir, command_parser


def parse_words(
    name: str, description: str | None, own: Collection[str], help: str
) -> tuple[dict[str, str], list[str]]:
    """The command line of `batchscope <name>`: its own options, and those that change the run's configuration.

    Raises:
        UserError: as `take_own`, and for a `ckpt` that is no file.
    """
    parser = command_parser(name, description)
    parser.add_argument("words", nargs="*", metavar="option=value", help=help)
    add_config_dir(parser)
    args = parser.parse_intermixed_args()
    use_config_dir(args.config_dir)
    given, overrides = take_own(args.words, own)
    if "ckpt" in given and not Path(given["ckpt"]).is_file():
        raise UserError(f"ckpt: got '{given['ckpt']}', which is not a file")
    return given, overrides


def take_own(words: list[str], own: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The command's own options among the words, and the rest, which change the run's configuration.

    Raises:
        UserError: for an option that is given twice or has no value, and for a word that is nearly one of them.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, is_option, value = word.partition("=")
        if not is_option:
            example = f"; write ckpt={word}" if Path(word).exists() and "ckpt" in own else ""
            raise UserError(f"{word}: takes option=value{example}")
        if key not in own:
            if "." not in key and (near := did_you_mean(key, own)):
                raise UserError(f"{key}: no such option.{near}")
            rest.append(word)
        elif key in given or not value:
            raise UserError(f"{key}: {'is given twice' if key in given else 'takes a value'}")
        else:
            given[key] = value
    return given, rest
