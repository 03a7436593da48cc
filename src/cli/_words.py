"""The words `option=value` of the commands that read a checkpoint."""

from collections.abc import Collection
from pathlib import Path

from ..errors import UserError, did_you_mean


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
