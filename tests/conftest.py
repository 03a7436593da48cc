"""What tests share: one thread, and the real MNIST, where it lies beside the repository."""

from pathlib import Path

import pytest
import torch

SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests compute with small tensors: threads that wait for each other take ten times longer on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the real files; `data.root` of a run on them."""
    if not (SHARED_DATA / "MNIST" / "raw").is_dir():
        pytest.skip(f"the real MNIST files are not in {SHARED_DATA}")
    return SHARED_DATA
