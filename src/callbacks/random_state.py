"""The state of every random generator that training draws from, as tensors and plain numbers."""

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """The states of torch's generators (CPU, CUDA, MPS), Python's and numpy's; nothing is drawn from them."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = numpy.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
        "numpy": {
            "keys": torch.tensor(keys.astype("int64")),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Let every generator go on where it was; those of devices that this machine lacks are left out."""
    torch.set_rng_state(state["torch"])
    python, numbers = state["python"], state["python"]["numbers"].tolist()
    random.setstate((python["version"], tuple(numbers), python["gauss"]))
    ours = state["numpy"]
    numpy.random.set_state(
        ("MT19937", ours["keys"].numpy().astype("uint32"), ours["position"], ours["has_gauss"], ours["cached"])
    )
    if "cuda" in state and torch.cuda.is_available():
        for index, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
