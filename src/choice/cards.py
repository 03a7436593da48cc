"""The cards that a prediction can be asked for, by name. Of no other maker than NVIDIA have kernels been measured."""

from ..errors import UserError, did_you_mean
from ..hardware.datasheet import Datasheet, by_short_name


def card_names() -> list[str]:
    """The short names of all cards, in the order of the datasheets."""
    return [name for name, sheet in by_short_name().items() if sheet.kind == "cuda"]


def find_card(name: str, option: str = "--devices") -> Datasheet:
    """The card of this short name: `a100`, `rtx4090`.

    Raises:
        UserError: naming the option, for an unknown name and for a device of another maker, with the nearest known one.
    """
    sheet, known = by_short_name().get(name.strip().lower()), card_names()
    if sheet is None or sheet.kind != "cuda":
        near = did_you_mean(name.strip().lower(), known)
        got = f"{option}: got {name!r}, which is no known card.{near}"
        raise UserError(f"{got} Predicted are NVIDIA's {', '.join(known)}")
    return sheet
