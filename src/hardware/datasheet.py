"""What the manufacturer states of a device: the peaks that a measurement is held against.

`devices.yaml` beside this file has the cards, with the source of each. A card is known by the exact name that torch
reports. A slice of a card (MIG), a laptop's or a renamed variant has other clocks, and so has no entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from .calibration import Calibration, peak_flops_per_sec

_FILE = Path(__file__).with_name("devices.yaml")
_MAKER = "NVIDIA "  # drivers before 2021 report a card without it


@dataclass(frozen=True)
class Datasheet:
    """A card as its datasheet has it. FLOP/s are those of dense products, never of sparse ones."""

    names: tuple[str, ...]  # that torch reports, without `NVIDIA `
    memory_gib: float
    memory_bytes_per_sec: float
    flops_per_sec: Mapping[str, float]  # by precision: `fp32`, `tf32`, `bf16`, `fp16`, `fp64`
    sms: int  # multiprocessors
    tdp_w: float
    source: Mapping[str, str | int]  # the document's `name`, and the year of its edition, `date`


def datasheet(device_name: str) -> Datasheet | None:
    """The facts of the card that torch reports by this name; None for every other name."""
    return datasheets().get(device_name.removeprefix(_MAKER))


def datasheet_peak(
    device_name: str,
    precision: str | int | None = None,
    module: nn.Module | None = None,
    shares: Mapping[str, float] | None = None,
) -> float | None:
    """The dense peak in FLOP/s that the datasheet states for a training step.

    Args:
        device_name: as torch reports it.
        precision, module, shares: as `peak_flops_per_sec` takes them. torch's switches decide between fp32 and TF32.

    Returns:
        None for an unknown card, and for a precision that it has no hardware for.
    """
    card = datasheet(device_name)
    if card is None:
        return None
    stated = Calibration("cuda", device_name, None, "", None, matmul_flops_per_sec=card.flops_per_sec)
    return peak_flops_per_sec(stated, precision, module, shares)


@cache
def datasheets() -> dict[str, Datasheet]:
    """Every card, by each of its names."""
    entries: list[dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    cards = [Datasheet(**(entry | {"names": tuple(entry["names"])})) for entry in entries]
    return {name: card for card in cards for name in card.names}
