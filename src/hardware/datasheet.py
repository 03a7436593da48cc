"""The makers' datasheets of devices: the peaks that a measurement is compared with, and that a prediction starts from.

`devices.yaml` beside this file has NVIDIA's cards, with the source of each. A card is found by the exact name that torch
reports. A slice of a card (MIG), a laptop's or a renamed variant has other clocks, and so no entry. This module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, did_you_mean

_FILE = Path(__file__).with_name("devices.yaml")
_MAKER = "NVIDIA "  # drivers before 2021 report a card without it


@dataclass(frozen=True)
class Datasheet:
    """The numbers of a device's datasheet. FLOP/s are those of dense products, never of sparse ones."""

    names: tuple[str, ...]  # that torch reports, without `NVIDIA `
    short: tuple[str, ...]  # for a command line
    memory_gib: float
    memory_bytes_per_sec: float
    flops_per_sec: Mapping[str, float]  # by precision: `fp32`, `tf32`, `bf16`, `fp16`, `fp64`
    source: Mapping[str, str | int]  # the document's `name`, and the year of its edition, `date`
    # torch's type: `cuda` of every card; choice/measured.py makes datasheets of other types for measured devices.
    kind: str = "cuda"
    sms: int | None = None  # multiprocessors
    cores_per_sm: int | None = None  # float32 lanes
    clock_mhz: float | None = None  # at most
    l2_mib: float | None = None
    tdp_w: float | None = None


def datasheet(device_name: str) -> Datasheet | None:
    """Return the datasheet of the card that torch reports by this name; None for any other name."""
    name = device_name.removeprefix(_MAKER)
    return next((sheet for sheet in datasheets() if name in sheet.names), None)


@cache
def datasheets() -> tuple[Datasheet, ...]:
    """Return the datasheets of all cards."""
    entries: list[dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    for entry in entries:
        entry |= {key: tuple(entry[key]) for key in ("names", "short")}
    return tuple(Datasheet(**entry) for entry in entries)


def card_names() -> list[str]:
    """Return the short names of all cards, in the order of the datasheets."""
    return [name for sheet in datasheets() for name in sheet.short]


def find_cards(names: str, option: str) -> list[Datasheet]:
    """Return the cards of these short names, `t4,h100`, or of `all`, each once. Raise UserError as `find_card`."""
    short_names = card_names() if names == "all" else names.split(",")
    return list({(card := find_card(name, option)).short[0]: card for name in short_names}.values())


def find_card(name: str, option: str = "--devices") -> Datasheet:
    """Return the card of this short name: `a100`, `rtx4090`.

    Raises:
        UserError: for an unknown name; the message has the option and the nearest known name.
    """
    short_name, short_names = name.strip().lower(), card_names()
    for sheet in datasheets():
        if short_name in sheet.short:
            return sheet
    message = f"{option}: got {name!r}, which is no known card.{did_you_mean(short_name, short_names)}"
    raise UserError(f"{message} Predicted are NVIDIA's {', '.join(short_names)}")
