"""The callbacks that Lightning adds to every Trainer of a script that `batchscope run` started.

Lightning calls these functions, through the entry points of pyproject.toml, in every project where batchscope is
installed. Outside of `batchscope run` they return no callbacks and import nothing.
"""

import os
import sys
from typing import Any

FOLDER = "BATCHSCOPE_RUN"  # the environment variable with the folder of the script's run


def callbacks() -> list[Any]:
    """Return the monitors for a Trainer of `lightning.pytorch`; none outside of `batchscope run`. Never raise."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return []
    try:
        from pathlib import Path

        from .training.script import ScriptRecord

        return [ScriptRecord(Path(folder))]
    except Exception as error:  # noqa: BLE001 - the script has to run as without this package
        _say(f"nothing is measured: {type(error).__name__}: {error}")
        return []


def callbacks_of_old_package() -> list[Any]:
    """Return no callbacks for a Trainer of `pytorch_lightning`; under `batchscope run` print why."""
    if os.environ.get(FOLDER):
        _say("nothing is measured: the Trainer is of pytorch_lightning; import lightning.pytorch instead")
    return []


def _say(text: str) -> None:
    print(f"batchscope: {text}", file=sys.stderr, flush=True)
