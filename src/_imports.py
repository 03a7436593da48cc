"""Import torch, Lightning and their dependencies in less time, and skip their teardown when the process ends."""

import atexit
import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

_SIGNAL, _ITS_USER = "scipy.signal", "srmrpy"
_skips_teardown = False  # whether the imported objects stay uncollected when the interpreter ends


@contextlib.contextmanager
def quick_imports(leave: bool = True) -> Iterator[None]:
    """Disable garbage collection in the block: imports leave hardly any, and the search takes a tenth of their time.

    With `leave`, if the block is the first to import Lightning, all objects that exist at its end are excluded from
    later collections, also at the interpreter's end, which take over a second. Later objects are collected as usual.
    """
    global _skips_teardown
    is_first, was_enabled = "lightning" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        _import_torchmetrics()
        yield
    finally:
        if was_enabled:
            gc.enable()
    if leave and is_first:
        _skips_teardown = True
        gc.freeze()


def _import_torchmetrics() -> None:
    """Import torchmetrics, which Lightning imports, without scipy.signal, which takes half a second.

    torchmetrics imports scipy.signal only to add the name `hamming`, which old versions of scipy have, for SRMRpy.
    """
    if _SIGNAL in sys.modules or importlib.util.find_spec(_ITS_USER):
        return
    sys.modules[_SIGNAL] = stand_in = ModuleType(_SIGNAL)
    vars(stand_in)["hamming"] = None
    try:
        import torchmetrics  # noqa: F401
    finally:
        del sys.modules[_SIGNAL]


@atexit.register  # registered before torch's handlers, and so called after them
def _silence_triton() -> None:
    """Redirect standard error to /dev/null: Triton prints each of its types that exists after the interpreter's end."""
    if _skips_teardown:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
