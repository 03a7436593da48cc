"""What the makers state of their devices: the peaks that a measurement is held against, and that a prediction starts from.

`devices.yaml` beside this file has the devices, with the source of each. An NVIDIA card is known by the exact name that
torch reports. A slice of a card (MIG), a laptop's or a renamed variant has other clocks, and so has no entry. This module
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
    kind: str = "cuda"  # `cuda`, `rocm`, `mps`, `tpu`
    sms: int | None = None  # multiprocessors; AMD's compute units, Apple's GPU cores
    cores_per_sm: int | None = None  # float32 lanes
    clock_mhz: float | None = None  # at most
    l2_mib: float | None = None
    tdp_w: float | None = None


def datasheet(device_name: str) -> Datasheet | None:
    """The facts of the NVIDIA card that torch reports by this name; None for every other name."""
    found = datasheets().get(device_name.removeprefix(_MAKER))
    return found if found is not None and found.kind == "cuda" else None


@cache
def datasheets() -> dict[str, Datasheet]:
    """Every device, by each of its names."""
    entries: list[dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    for entry in entries:
        entry |= {key: tuple(entry[key]) for key in ("names", "short")}
    sheets = [Datasheet(**entry) for entry in entries]
    return {name: sheet for sheet in sheets for name in sheet.names}


@cache
def by_short_name() -> dict[str, Datasheet]:
    """Every device by the names that a command line takes: `t4`, `h100`, …"""
    return {name: sheet for sheet in datasheets().values() for name in sheet.short}


def find_card(name: str, option: str = "--devices") -> Datasheet:
    """The NVIDIA card of this short name. UserError, naming the option, for any other name, with the nearest known one."""
    known = [short for short, sheet in by_short_name().items() if sheet.kind == "cuda"]
    if (short := name.strip().lower()) not in known:
        got = f"{option}: got {name!r}, which is no known card.{did_you_mean(short, known)}"
        raise UserError(f"{got} Predicted are NVIDIA's {', '.join(known)}")
    return by_short_name()[short]
