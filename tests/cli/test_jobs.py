"""The runs of a sweep are called for with what Hydra gives to a job, by this process or by Hydra's launcher."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from batchscope.cli.jobs import start_jobs
from batchscope.files import WriteError
from batchscope.options.compose import compose_command_line


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    HydraConfig.instance().cfg = None


def jobs_of(*words: str) -> list[tuple[Any, ...]]:
    """What each job of a sweep is called with: number, folder, choice, overrides, batch size, environment."""
    seen = []

    def job(config: DictConfig) -> None:
        known = HydraConfig.get()
        facts = (known.job.num, known.runtime.output_dir, known.runtime.choices.model, list(known.overrides.task))
        seen.append((*facts, config.data.batch_size, os.environ.get("MARK"), "hydra" in config))

    overrides = [*words, "+hydra.job.env_set.MARK=set"]
    start_jobs(compose_command_line(overrides, multirun=True), overrides, Path("s"), job)
    return seen


def test_a_job_gets_what_hydra_gives_it(tmp_path: Path) -> None:
    assert jobs_of("model=mlp", "data.batch_size=4,8") == [
        (number, str(tmp_path / "s" / str(number)), "mlp", ["model=mlp", f"data.batch_size={size}"], size, "set", False)
        for number, size in enumerate((4, 8))
    ]
    assert "MARK" not in os.environ


def test_jobs_are_the_same_by_hydras_own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = jobs_of("model=mlp", "data.batch_size=4,8")
    monkeypatch.setattr("batchscope.sweep.launchers.is_basic", lambda launcher: False)
    assert jobs_of("model=mlp", "data.batch_size=4,8") == ours


def test_a_folder_that_hydra_cannot_make_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchscope.sweep.launchers.is_basic", lambda launcher: False)
    (tmp_path / "s").touch()
    with pytest.raises(WriteError, match="hydra.sweep.dir: s cannot be written"):
        jobs_of("seed=1,2")
