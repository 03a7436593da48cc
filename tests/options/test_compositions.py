"""A composition whose choices were composed before is the one that Hydra composes."""

from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

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
def test_is_what_hydra_composes(line: list[str]) -> None:
    compose(line)
    again, by_hydra = compose(line), hydra.compose("train", line, return_hydra_config=True)
    assert plain(again) == plain(by_hydra)
    assert OmegaConf.is_struct(again)
    assert again.hydra.run.dir == by_hydra.hydra.run.dir or "${now:" in plain(by_hydra)["hydra"]["run"]["dir"]


def test_the_same_choices_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compose(["model=mlp", "data.batch_size=4"])
    monkeypatch.setattr(compositions, "hydra_compose", None)
    assert compose(["model=mlp", "data.batch_size=8", "hydra.run.dir=out"]).data.batch_size == 8


def test_what_is_set_in_one_does_not_reach_the_next() -> None:
    first = compose(["seed=1"])
    first.model.hidden_size = 3
    assert plain(compose(["seed=2"])) == plain(hydra.compose("train", ["seed=2"], return_hydra_config=True))


def test_knows_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compose([])
    monkeypatch.chdir(tmp_path)
    assert compose([]).hydra.runtime.cwd == str(tmp_path)
