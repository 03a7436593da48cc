"""The cards that a prediction can be asked for, by name. Of no other maker than NVIDIA have kernels been measured."""

import re

from ..errors import UserError, did_you_mean
from ..hardware.datasheet import Datasheet, by_short_name, datasheets

_MAKERS = re.compile("^(nvidia|geforce|tesla)+")


def card_names() -> list[str]:
    """The short names of all cards, in the order of the datasheets. Of several variants the first is the commonest."""
    return [name for name, sheet in by_short_name().items() if sheet.kind == "cuda"]


def find_card(name: str, option: str = "--devices") -> Datasheet:
    """The card of this name: a short one (`a100`, `rtx4090`), or the one that torch reports.

    Raises:
        UserError: naming the option, for an unknown name, with the nearest known one, and for a device of another maker.
    """
    known = {_plain(each): sheet for each, sheet in (datasheets() | by_short_name()).items()}  # a short name wins
    sheet = known.get(_plain(name))
    if sheet is None:
        near = did_you_mean(name.strip().lower(), card_names())
        raise UserError(
            f"{option}: got {name!r}, which is no known card.{near} The known ones are {', '.join(card_names())}"
        )
    if sheet.kind != "cuda":
        raise UserError(
            f"{option}: got {name!r}, which is no card of NVIDIA's, and no other maker's kernels have been measured"
        )
    return sheet


def _plain(name: str) -> str:
    """A name without its maker, capitals, spaces and hyphens."""
    return _MAKERS.sub("", "".join(character for character in name.lower() if character.isalnum()))
