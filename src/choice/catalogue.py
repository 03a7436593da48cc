"""The devices that a prediction can be asked for, by the names that a command line takes."""

import re

from ..errors import UserError, did_you_mean
from ..hardware.datasheet import Datasheet, by_short_name, datasheets
from .device import Device

_GIB, _MIB = 2**30, 2**20
_MAKERS = re.compile("^(nvidia|amd|instinct|apple|google|geforce|tesla)+")


def find_device(name: str) -> Device:
    """The device of this name: a short one (`a100`, `rtx4090`), or the one that torch reports.

    Raises:
        UserError: for an unknown name, with the nearest known one.
    """
    known = _by_plain_name()
    sheet = known.get(_plain(name))
    if sheet is None:
        near = did_you_mean(name.strip().lower(), by_short_name())
        raise UserError(f"{name!r} is no known device.{near} The known ones are {', '.join(device_names())}")
    return device_of(sheet)


def known_device(name: str) -> Device | None:
    """The device that torch reports by this exact name; None for an unknown one."""
    sheet = datasheets().get(name.removeprefix("NVIDIA "))
    return device_of(sheet) if sheet is not None else None


def device_names() -> list[str]:
    """The short names of all devices, in the order of the datasheets. Of several variants the first is the commonest."""
    return list(by_short_name())


def device_of(sheet: Datasheet) -> Device:
    """A datasheet's facts in SI units."""
    return Device(
        name=sheet.names[0],
        kind=sheet.kind,
        memory_bytes=sheet.memory_gib * _GIB,
        bytes_per_sec=sheet.memory_bytes_per_sec,
        flops_per_sec=sheet.flops_per_sec,
        sms=sheet.sms,
        l2_bytes=None if sheet.l2_mib is None else sheet.l2_mib * _MIB,
        clock_hz=None if sheet.clock_mhz is None else sheet.clock_mhz * 1e6,
        cores_per_sm=sheet.cores_per_sm,
        tdp_w=sheet.tdp_w,
    )


def _plain(name: str) -> str:
    """A name without its maker, capitals, spaces and hyphens."""
    return _MAKERS.sub("", "".join(character for character in name.lower() if character.isalnum()))


def _by_plain_name() -> dict[str, Datasheet]:
    everything = datasheets() | by_short_name()  # a short name wins
    return {_plain(name): sheet for name, sheet in everything.items()}
