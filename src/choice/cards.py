"""The cards that a prediction can be asked for, by name. Of no other maker than NVIDIA have kernels been measured."""

from ..errors import UserError, did_you_mean
from ..hardware.datasheet import Datasheet, datasheets


def card_names() -> list[str]:
    """The short names of all cards, in the order of the datasheets."""
    return [name for sheet in datasheets() for name in sheet.short]


def find_card(name: str, option: str = "--devices") -> Datasheet:
    """The card of this short name: `a100`, `rtx4090`.

    Raises:
        UserError: naming the option, for an unknown name, with the nearest known one.
    """
    asked, known = name.strip().lower(), card_names()
    for sheet in datasheets():
        if asked in sheet.short:
            return sheet
    got = f"{option}: got {name!r}, which is no known card.{did_you_mean(asked, known)}"
    raise UserError(f"{got} Predicted are NVIDIA's {', '.join(known)}")
