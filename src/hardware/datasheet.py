"""What the makers state of their devices: the peaks that a measurement is held against, and that a prediction starts from.

`devices.yaml` beside this file has NVIDIA's cards, with the source of each. A card is known by the exact name that torch
reports. A slice of a card (MIG), a laptop's or a renamed variant has other clocks, and so has no entry. This module
imports no torch.
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
    """A device as its datasheet has it. FLOP/s are those of dense products, never of sparse ones."""

    names: tuple[str, ...]  # that torch reports, without `NVIDIA `
    short: tuple[str, ...]  # for a command line
    memory_gib: float
    memory_bytes_per_sec: float
    flops_per_sec: Mapping[str, float]  # by precision: `fp32`, `tf32`, `bf16`, `fp16`, `fp64`
    source: Mapping[str, str | int]  # the document's `name`, and the year of its edition, `date`
    # torch's type of device: `cuda` of every card; of a device that a run has measured (choice/measured.py), its own.
    kind: str = "cuda"
    sms: int | None = None  # multiprocessors
    cores_per_sm: int | None = None  # float32 lanes
    clock_mhz: float | None = None  # at most
    l2_mib: float | None = None
    tdp_w: float | None = None


def datasheet(device_name: str) -> Datasheet | None:
    """The facts of the card that torch reports by this name; None for every other name."""
    name = device_name.removeprefix(_MAKER)
    return next((sheet for sheet in datasheets() if name in sheet.names), None)


@cache
def datasheets() -> tuple[Datasheet, ...]:
    """Every card."""
    entries: list[dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    for entry in entries:
        entry |= {key: tuple(entry[key]) for key in ("names", "short")}
    return tuple(Datasheet(**entry) for entry in entries)


def card_names() -> list[str]:
    """The short names of all cards, in the order of the datasheets."""
    return [name for sheet in datasheets() for name in sheet.short]


def find_cards(names: str, option: str) -> list[Datasheet]:
    """The cards of these short names, `t4,h100`, or of `all`, each once; UserError as `find_card`."""
    asked = card_names() if names == "all" else names.split(",")
    return list({(card := find_card(name, option)).short[0]: card for name in asked}.values())


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
