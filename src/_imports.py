"""Torch, Lightning and what they bring: imported in less time, and left as they are when the process ends."""

import atexit
import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

_SIGNAL, _ASKED_BY = "scipy.signal", "srmrpy"
_is_left = False  # whether libraries are not taken apart at the end


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Within, no garbage is collected: imports leave hardly any, and the search takes a tenth of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        _import_torchmetrics()
        yield
    finally:
        if was_enabled:
            gc.enable()


def _import_torchmetrics() -> None:
    """Import torchmetrics, which Lightning asks for, without scipy.signal, which takes half a second.

    torchmetrics imports that to add the name `hamming`, which old versions of scipy have, for the package SRMRpy alone.
    """
    if _SIGNAL in sys.modules or importlib.util.find_spec(_ASKED_BY):
        return
    sys.modules[_SIGNAL] = stand_in = ModuleType(_SIGNAL)
    vars(stand_in)["hamming"] = None
    try:
        import torchmetrics  # noqa: F401
    finally:
        del sys.modules[_SIGNAL]


def leave_imports() -> None:
    """What has been imported is in no collection of garbage from here on, nor in those of the interpreter's end.

    That end takes more than a second of searching where torch is imported. Objects that are made later end as ever.
    """
    global _is_left
    _is_left = True
    gc.freeze()


@atexit.register  # before torch's handlers, and so called after them
def _end_in_silence() -> None:
    """Triton's library prints the name of each of its types that still exists when the interpreter has ended."""
    if _is_left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
