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
def quick_imports(leave: bool = True) -> Iterator[None]:
    """Within, no garbage is collected: imports leave hardly any, and the search takes a tenth of their time.

    With `leave`, where Lightning is imported here for the first time, everything that is imported by then is left out of all
    later collections, also of those at the interpreter's end, which take more than a second. Objects that are made later
    are collected as ever.
    """
    global _is_left
    is_first, was_enabled = "lightning" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        _import_torchmetrics()
        yield
    finally:
        if was_enabled:
            gc.enable()
    if leave and is_first:
        _is_left = True
        gc.freeze()


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


@atexit.register  # before torch's handlers, and so called after them
def _end_in_silence() -> None:
    """Triton's library prints the name of each of its types that still exists when the interpreter has ended."""
    if _is_left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
