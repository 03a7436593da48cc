"""For all tests: one thread, a restored environment, a calibrated processor, MNIST or a stand-in, and the wheel."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Tests compute with small tensors: on a busy machine several threads take ten times longer. Set before torch reads it,
# for this process and for those that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# Whether there is a GPU is asked while tests are collected, and must not initialize CUDA: processes are forked later.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# The user's cache is not touched. Of it only the fonts that matplotlib has found are used.
_caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("MPLCONFIGDIR", str(_caches / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = _cache = tempfile.mkdtemp(prefix="batchscope-tests-")
# No test cuts the power: to flush each file to the disk takes milliseconds. Tests of that watch or fail the call.
os.fsync = lambda descriptor: None
# Imports and collected tests are no garbage.
gc.disable()
# While tests are collected, their compiled form is kept: each process would compile them again, for seconds.
_dont_write, sys.dont_write_bytecode = sys.dont_write_bytecode, False
# A background job or nohup ignores these signals, and so would the runs that tests start and stop by them.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

import pytest

from tests.support import fork_server, systems, wheel

if _system := os.environ.get(systems.PRETEND):
    systems.pretend(_system)

if "PYTEST_XDIST_WORKER" in os.environ:  # which imports Lightning sooner or later, and scipy.signal for nothing
    from batchscope._imports import quick_imports

    with quick_imports(leave=False):
        import lightning  # noqa: F401

SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the server from which tests start runs, if any of them does; while tests are collected, warnings are caught.

    What was imported is no garbage: to look through its 500,000 objects again takes a part of a second each time.
    """
    sys.dont_write_bytecode = _dont_write
    gc.freeze()
    atexit.register(
        gc.unfreeze
    )  # later than pytest's five collections when it ends, which would look through all again
    gc.enable()
    if "omegaconf" in sys.modules:
        from tests.support import parsed_once

        parsed_once.install()
    if "tests.support.runs" in sys.modules and not session.config.option.collectonly:
        fork_server.start()
    if "torch" in sys.modules:
        _calibrate()


def _calibrate() -> None:
    """Write a calibration of this processor, which takes ten seconds to measure."""
    import torch

    from batchscope.hardware.calibration import Calibration
    from batchscope.hardware.measure import identity, store

    rates = {"fp32": 1e11, "bf16": 1e11}
    store(Calibration(**identity(torch.device("cpu")), matmul_flops_per_sec=rates, memory_bytes_per_sec=1e10))


def pytest_sessionfinish() -> None:
    fork_server.stop()
    shutil.rmtree(_cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Remove the variables that a command in this process has set, for example HYDRA_FULL_ERROR."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if name != "PYTEST_CURRENT_TEST":  # pytest's own
            del os.environ[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """See own_package.py, which imports Hydra: pytest starts its workers sooner if this file does not."""
    from tests.support import own_package

    yield from own_package.package(tmp_path, monkeypatch)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written without pictures, which take longer than all else."""
    monkeypatch.setattr("batchscope.analysis.plots.draw", lambda *_: {})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict does not depend on what other programs do on the machine that runs the test."""
    for rule in ("bottleneck.BUSY", "bottleneck.SHARED", "processor.MAX_SHARE"):
        monkeypatch.setattr(f"batchscope.hardware.{rule}", 2.0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """`data.root` of the real MNIST, for tests of its checksums, its statistics or the accuracy on it."""
    if not _has_mnist():
        pytest.skip(f"needs the real MNIST, which is not in {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def mnist_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MNIST's files: the real ones, or fabricated ones where those are missing."""
    if _has_mnist():
        return SHARED_DATA
    from tests.support import fabricated_mnist

    return fabricated_mnist.write(tmp_path_factory.mktemp("fabricated"), num_train=6_000, num_test=2_500)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return wheel.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> wheel.Environment:
    """An environment in which this wheel is installed, and the checkout is not."""
    return wheel.Environment(tmp_path_factory.mktemp("installed"), built)


def _has_mnist() -> bool:
    return (SHARED_DATA / "MNIST" / "raw").is_dir()
