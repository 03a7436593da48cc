"""A run's folder, and a package that is written for a test, to be read as source text and never imported."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchscope.options import signatures


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `out` in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    return Path("out")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write a package `toy` of the given modules; importing any of it would fail."""
    monkeypatch.syspath_prepend(tmp_path)
    caches = (signatures.signature_of, signatures.class_attribute, signatures._load)

    def write(**modules: str) -> None:
        (tmp_path / "toy").mkdir(exist_ok=True)
        for name, text in {"__init__": "", **modules}.items():
            source = "raise ImportError('never imported')\n" + textwrap.dedent(text)
            (tmp_path / "toy" / f"{name}.py").write_text(source, encoding="utf-8")
        for cached in caches:
            cached.cache_clear()

    yield write
    for cached in caches:
        cached.cache_clear()
