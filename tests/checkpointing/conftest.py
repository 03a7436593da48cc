"""Fixtures: killed, finished and uninterrupted runs, for the tests of resuming."""

import shutil
from pathlib import Path

import pytest

from tests.checkpointing.support import OUT, STEP
from tests.support.runs import EVERY_4, SMALL, kill_9, run


@pytest.fixture(scope="session")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("unstopped")
    run(folder, *SMALL, EVERY_4, OUT, code=0)
    return folder / "out"


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run that was killed in its second epoch: it has a last and a best checkpoint."""
    folder = tmp_path_factory.mktemp("interrupted")
    run(folder, *SMALL, EVERY_4, OUT, faults=[(STEP, 18, kill_9)], code=-9)
    return folder


@pytest.fixture(scope="session")
def at_one_rate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a finished run. It can be made longer: its learning rate is constant."""
    folder = tmp_path_factory.mktemp("at_one_rate")
    run(folder, *SMALL, EVERY_4, OUT, "optimizer.schedule=constant", code=0)
    return folder


@pytest.fixture
def finished(at_one_rate: Path, tmp_path: Path) -> Path:
    """A copy of `at_one_rate`."""
    return Path(shutil.copytree(at_one_rate, tmp_path / "finished"))


@pytest.fixture
def killed(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of `interrupted` that a test may damage."""
    return Path(shutil.copytree(interrupted, tmp_path / "killed"))
