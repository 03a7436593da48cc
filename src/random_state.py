"""The state of every random generator that training draws from, as tensors and plain numbers."""

import random
from typing import Any, cast

import numpy
import torch


def random_state() -> dict[str, Any]:
    """Return the states of the generators of torch (CPU, CUDA, MPS), Python and numpy, without advancing them."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(tuple[str, numpy.ndarray, int, int, float], numpy.random.get_state())
    state: dict[str, Any] = {
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
    """Restore the generators from `random_state()`, except those of devices that this machine lacks."""
    torch.set_rng_state(state["torch"])
    python, mersenne = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    keys = mersenne["keys"].numpy().astype("uint32")
    numpy.random.set_state(("MT19937", keys, mersenne["position"], mersenne["has_gauss"], mersenne["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
