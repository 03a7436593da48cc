"""A fixture: the folder of a run."""

from pathlib import Path

import pytest


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `out` in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    return Path("out")
