"""A command line is composed into the checked configurations of its runs, before anything is imported or written.

What is refused stands in tests/cli/test_command_lines.py.
"""

from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from batchscope.options.check import check_config
from batchscope.options.compose import apply_overrides, compose, compose_command_line
from batchscope.options.groups import CONFIGS, use_config_dir
from batchscope.options.signatures import is_installed
from tests.support.command_lines import composed, refusal
from tests.support.own_package import Write

YAMLS = sorted([*CONFIGS.glob("*/*.yaml"), *CONFIGS.glob("hydra/*/*.yaml")])


@pytest.mark.parametrize("file", YAMLS, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_every_yaml_begins_with_the_command_that_uses_it(file: Path) -> None:
    lines = file.read_text().splitlines()
    command = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert command.startswith("# python train.py ")
    OmegaConf.load(file)
    if file.relative_to(CONFIGS).parts[0] == "hydra":
        return
    words = command.removeprefix("# python train.py ").split()
    for package in ("wandb", "mlflow"):
        if f"logger={package}" in words and not is_installed(package):
            pytest.skip(f"needs {package}: pip install 'batchscope[{package}]'")
    assert file.stem == "default" or f"{file.parent.name}={file.stem}" in words
    compose_command_line([word for word in words if word != "-m"], multirun="-m" in words)


# --- the runs of a sweep, and folders --------------------------------------------------------------------------------


# A sweep, what all its runs have, and what sets each apart.
SWEEPS = [
    (
        "model=cnn,mlp data.batch_size=4,8 seed=1",
        "seed=1",
        [f"model={model} data.batch_size={size}" for model in ("cnn", "mlp") for size in (4, 8)],
    ),
    ("test=False data.augment.flip=true,false", "test=false", ["data.augment.flip=true", "data.augment.flip=false"]),
    ("model=glob([cnn,ml*])", "", ["model=cnn", "model=mlp"]),
    ("seed=1,2 seed=3,4", "", ["seed=3", "seed=4"]),
]


@pytest.mark.parametrize(("line", "fixed", "labels"), SWEEPS)
def test_a_sweep_has_a_run_for_each_combination_as_people_write_it(line: str, fixed: str, labels: list[str]) -> None:
    sweep = compose_command_line(line.split(), multirun=True)
    runs = [[*fixed.split(), *label.split()] for label in labels]
    assert sweep.labels == labels
    assert [sorted(one.hydra.overrides.task) for one in sweep.compositions] == [*map(sorted, runs)]
    assert sweep.configs == [composed(*run) for run in runs]


def test_the_seed_reaches_the_data_also_when_it_is_0() -> None:
    assert [composed(f"seed={seed}")["data"]["seed"] for seed in (0, 1)] == [0, 1]


FOLDERS = {
    "hydra.run.dir=/tmp/x": "/tmp/x",
    "hydra.run.dir=out/of-${data.batch_size}": "out/of-128",
    "-m seed=1,2 hydra.sweep.dir=there": "there",
    "-m seed=1,2 ++hydra.sweep.dir=there": "there",
    "-m seed=1,2 experiment=place": "mine",
    "-m seed=1,2": None,
    "": None,
}


def test_a_folder_that_is_named_is_told_from_the_installed_default(package: Write) -> None:
    package({"experiment/place": "# @package _global_\nhydra:\n  sweep:\n    dir: mine\n"})
    use_config_dir("conf")
    for line, folder in FOLDERS.items():
        found = compose_command_line(line.removeprefix("-m").split(), multirun=line.startswith("-m"))
        assert found.folder_chosen is (folder is not None), line
        assert folder in (str(found.folder), None)


# --- a configuration that was composed earlier -----------------------------------------------------------------------


def changed(*overrides: str) -> dict:
    """A configuration as a record holds it, with options changed."""
    return check_config(apply_overrides(composed(), list(overrides)))


CHANGES = [
    *(f"trainer.max_epochs={epochs}" for epochs in (-1, 0, "null")),
    *(f"trainer.limit_train_batches={batches}" for batches in (0, 8, 0.5)),
    *(f"trainer.val_check_interval={interval}" for interval in (1.0, 5, "00:00:10:00")),
    *(f"trainer.precision={precision}" for precision in ("bf16-mixed", 32, "null")),
    *("trainer.deterministic=warn", "trainer.gradient_clip_val=0", "trainer.profiler=simple"),
    *("trainer.fast_dev_run=true", "trainer.fast_dev_run=3", "trainer.num_sanity_val_steps=-1"),
    *("trainer.max_steps=7", "trainer.max_time={hours:1}", "++data.batch_size=8", "~data.num_val"),
    *("~callbacks", "~logger", "logger=null", "model={hidden_size:3}"),
    *("model=mlp model.hidden_sizes=[8]", "model.hidden_sizes=[8] model=mlp", "model=mlp model={hidden_sizes:[8]}"),
]


@pytest.mark.parametrize("line", CHANGES)
def test_an_option_does_to_a_record_what_it_does_to_a_new_run(line: str) -> None:
    assert changed(*line.split()) == composed(*line.split()) != composed()


WRONG = "data.batch_sise=3 +data.batch_sise=3 ~data.batch_sise +data.batch_size=3 ~modle seed.foo=3"
WRONG += " +trainer.profiler=foo model=foo model=null foo=1 ~data.batch_size ~model data.batch_size model@x=cnn seed=1,"


@pytest.mark.parametrize("text", WRONG.split())
def test_what_is_wrong_with_an_option_is_said_as_for_a_new_run(text: str) -> None:
    assert refusal(changed, text) == refusal(composed, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed=1,2", "seed: got several values, takes one"),
        ("experiment=quickstart", "experiment: is for a new run"),
        ("hydra.run.dir=x", "hydra.run.dir: is for a new run"),
        ("hydra/launcher=ray", "hydra/launcher: is for a new run"),
    ],
)
def test_what_belongs_to_a_new_run_is_refused(text: str, said: str) -> None:
    assert refusal(changed, text).startswith(said)


# --- a composition whose choices were composed before is the one that Hydra composes ---------------------------------

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


def composed_by_hydra(line: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("train", line, return_hydra_config=True)


def plain(config: DictConfig) -> dict:
    return OmegaConf.to_container(config, resolve=False)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_is_what_hydra_composes(line: list[str]) -> None:
    compose(line).model.hidden_size = 17  # what is set in one does not reach the next
    again, by_hydra = compose(line), composed_by_hydra(line)
    assert plain(again) == plain(by_hydra)
    assert OmegaConf.is_struct(again)
    assert again.hydra.run.dir == by_hydra.hydra.run.dir or "${now:" in plain(by_hydra)["hydra"]["run"]["dir"]


def test_knows_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compose([])
    monkeypatch.chdir(tmp_path)
    assert compose([]).hydra.runtime.cwd == str(tmp_path)
