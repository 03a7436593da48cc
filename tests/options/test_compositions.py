"""A composition whose choices were composed before is the one that Hydra composes."""

import sys
from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from batchscope import _hydra
from batchscope.options import compositions
from batchscope.options.compositions import compose
from batchscope.options.groups import CONFIGS

LINES = [
    [],
    ["seed=7", "data.batch_size=8"],
    ["data=copy_memory", "model=lstm_cell", "model.hidden_size=8", "data.delay=3"],
    ["experiment=mnist_99", "+trainer.max_time={hours: 1}", "~trainer.precision"],
    ["logger=[]", "~callbacks.device", "callbacks.progress=null"],
    ["++trainer.limit_val_batches=2", "optimizer.lr=${model.hidden_size}", "run_dir='a b'"],
    ["hydra.run.dir=out/${hydra.job.override_dirname}", "seed=3", "data.batch_size=4"],
    ["hydra.sweep.subdir=${hydra.job.num}", "hydra/launcher=basic"],
    ["hydra.job.config.override_dirname.exclude_keys=[seed]", "seed=3", "data.batch_size=4"],
    ["model.hidden_size=5", "model={hidden_size: 3}"],
]


@pytest.fixture(autouse=True)
def initialized():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def plain(config: DictConfig) -> dict:
    return OmegaConf.to_container(config, resolve=False)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_is_what_hydra_composes(line):
    compose(line)
    again, by_hydra = compose(line), hydra.compose("train", line, return_hydra_config=True)
    assert plain(again) == plain(by_hydra)
    assert OmegaConf.is_struct(again)
    assert again.hydra.run.dir == by_hydra.hydra.run.dir or "${now:" in plain(by_hydra)["hydra"]["run"]["dir"]


def test_what_is_set_in_one_does_not_reach_the_next():
    first = compose(["seed=1"])
    first.model.hidden_size = 3
    assert plain(compose(["seed=2"])) == plain(hydra.compose("train", ["seed=2"], return_hydra_config=True))


def test_knows_the_working_directory(tmp_path, monkeypatch):
    compose([])
    monkeypatch.chdir(tmp_path)
    assert compose([]).hydra.runtime.cwd == str(tmp_path)


def test_a_file_of_the_users_is_read_each_time(tmp_path):
    (tmp_path / "model").mkdir()
    for size in (3, 4):
        (tmp_path / "model" / "mine.yaml").write_text(f"_target_: batchscope.models.MLP\nhidden_size: {size}\n")
        assert compose(["model=mine", f"hydra.searchpath=[file://{tmp_path}]"]).model.hidden_size == size


def seen_by_job(line: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    """What hydra.main gives to each job of a command line: its configuration, and Hydra's section."""
    GlobalHydra.instance().clear()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", *line])
    seen = []

    def job(config: DictConfig) -> None:
        seen.append((plain(config), plain(HydraConfig.get())))

    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
    return seen


@pytest.mark.parametrize(
    "line",
    [
        ["+trainer.max_time={hours: 1}", "~logger.csv", "experiment=quickstart", "hydra.run.dir=two"],
        ["-m", "data.batch_size=4,8", "seed=1", "hydra.sweep.dir=three"],
    ],
    ids=" ".join,
)
def test_hydras_jobs_see_no_difference(line, tmp_path, monkeypatch):
    by_hydra = seen_by_job(line, tmp_path, monkeypatch)
    with _hydra.composed_by(compose):
        assert seen_by_job(line, tmp_path, monkeypatch) == by_hydra
        assert seen_by_job(line, tmp_path, monkeypatch) == by_hydra  # now from what was composed before


def test_hydras_jobs_are_composed_of_known_choices(tmp_path, monkeypatch):
    line = ["model=mlp", "data.batch_size=4", "hydra.run.dir=out"]
    with _hydra.composed_by(compose):
        seen_by_job(line, tmp_path, monkeypatch)
        monkeypatch.setattr(compositions, "_compose_anew", None)
        assert len(seen_by_job(line, tmp_path, monkeypatch)) == 1
