"""What tests share: one thread, and the real MNIST, where it lies beside the repository."""

import os
from collections.abc import Iterator
from pathlib import Path

# Tests compute with small tensors: threads that wait for each other take ten times longer on a busy machine. Here for
# the processes that tests start, and for this one, before torch reads it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a command that runs in this process sets, as HYDRA_FULL_ERROR, is gone for the next test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if name != "PYTEST_CURRENT_TEST":  # pytest's own
            del os.environ[name]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the real files; `data.root` of a run on them."""
    if not (SHARED_DATA / "MNIST" / "raw").is_dir():
        pytest.skip(f"the real MNIST files are not in {SHARED_DATA}")
    return SHARED_DATA
