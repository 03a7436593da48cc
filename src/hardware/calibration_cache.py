"""Calibrations in the user's cache folder: one file for each device, driver, version of torch and number of threads."""

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..files import write_text
from .calibration import IDENTITY, Calibration
from .devices import device_name, nvml_handle

SCHEMA = 4  # of the cached file and of the way in which it is measured
# How long a disturbed calibration is used: its rates are too low, but the runs of a sweep do not measure them again.
DISTURBED_S = 600


def cached_calibration(device: torch.device) -> Calibration | None:
    """The device's calibration, if it was measured before with this driver and torch. Never measures, never raises."""
    known = identity(device)
    try:
        file = _cache_file(known)
        _check_owner(file.parent)
        found = Calibration.from_dict(json.loads(file.read_text(encoding="utf-8")))
        if found.disturbed and not 0 <= time.time() - file.stat().st_mtime < DISTURBED_S:
            return None
    except Exception:  # noqa: BLE001 - the file is missing, torn or something else altogether
        return None
    return found if all(getattr(found, key) == value for key, value in known.items()) else None


def store(calibration: Calibration) -> None:
    """Write a calibration to the cache with an atomic write; without effect where the cache cannot be written."""
    with contextlib.suppress(OSError):
        file = _cache_file({key: getattr(calibration, key) for key in IDENTITY})
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(file.parent)
        write_text(file, f"{json.dumps(calibration.to_dict(), indent=2)}\n")


def identity(device: torch.device) -> dict[str, Any]:
    """What a measurement is of; a change in any value asks for a new measurement."""
    known: dict[str, Any] = dict.fromkeys(IDENTITY)
    known |= {"device": device.type, "device_name": device_name(device)}
    known |= {"torch": torch.__version__, "host": platform.node()}
    if device.type == "cpu":
        return known | {"threads": torch.get_num_threads(), "driver": _instruction_sets()}
    if device.type == "mps":
        return known | {"driver": platform.mac_ver()[0] or None}
    known["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
    return known | ({"driver": torch.version.hip} if torch.version.hip else _nvidia_driver(device))


def _instruction_sets() -> str:
    """The ones that torch uses, and the most that oneDNN may use where the environment says so."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    return torch.backends.cpu.get_cpu_capability() + (f", oneDNN up to {most}" if most else "")


def _nvidia_driver(device: torch.device) -> dict[str, Any]:
    """The driver's version and the power limit in W, as far as NVML reports them."""
    known: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # NVML has an exception for each thing that can be missing
        import pynvml

        pynvml.nvmlInit()
        try:
            known["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
            known["power_limit_w"] = pynvml.nvmlDeviceGetPowerManagementLimit(nvml_handle(pynvml, device)) / 1000
        finally:
            pynvml.nvmlShutdown()
    return known


def _cache_file(known: Mapping[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps([SCHEMA, *known.values()]).encode(), digest_size=8).hexdigest()
    return _cache_folder() / f"calibration-{known['device']}-{digest}.json"


def _cache_folder() -> Path:
    """The user's cache folder; a temporary one where there is no home or no write access to it, as in some containers."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "batchscope"
    with contextlib.suppress(RuntimeError):  # neither HOME nor an entry in the system's list of users
        home = Path.home()
        base = home / ".cache"
        there = base if base.exists() else home
        if there.is_dir() and os.access(there, os.W_OK):
            return base / "batchscope"
    return Path(tempfile.gettempdir()) / f"batchscope-{_user_id()}"


def _user_id() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # on Windows each user has a temporary folder of their own


def _check_owner(folder: Path) -> None:
    """Among temporary files, where every user may make folders, use only the user's own.

    Raises:
        OSError: if the folder is another user's or does not exist.
    """
    if folder.parent == Path(tempfile.gettempdir()) and folder.lstat().st_uid != _user_id():
        raise PermissionError(f"{folder} belongs to another user")
