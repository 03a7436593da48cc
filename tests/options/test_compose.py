"""A command line is composed into the checked configurations of its runs, before anything is imported or written.

What is refused stands in tests/cli/test_command_lines.py.
"""

from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from batchscope.options.check import check_config
from batchscope.options.compose import apply_overrides, check_command_line, compose, compose_command_line
from batchscope.options.groups import CONFIGS, use_config_dir
from batchscope.options.overrides import as_override
from batchscope.options.signatures import is_installed
from tests.support.command_lines import composed, refusal


def check(line: str) -> list[dict]:
    words = line.split()
    return check_command_line([word for word in words if word != "-m"], multirun="-m" in words)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_reaches_the_data_also_when_it_is_0(seed: int) -> None:
    assert check(f"seed={seed}")[0]["data"]["seed"] == seed


@pytest.mark.parametrize("collection", ["~callbacks", "~logger", "logger=null"])
def test_a_collection_that_is_left_out_is_empty(collection: str) -> None:
    assert not check(collection)[0][collection.strip("~").partition("=")[0]]


TEXTS = [
    "s",
    "a b",
    " a",
    "a,b",
    "{x}",
    "[1]",
    "it's",
    'say "so"',
    "null",
    "true",
    "1e3",
    "a=b",
    "a\\b",
    "x\\",
    "é",
    "#",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_written_so_that_hydra_reads_it_back(text: str) -> None:
    assert composed("data=mnist", as_override("data.root", text))["data"]["root"] == text


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
    check(" ".join(words))


# --- the runs of a sweep, and folders --------------------------------------------------------------------------------


def test_a_sweep_is_planned_with_its_folder_and_what_sets_each_run_apart() -> None:
    words = ["model=cnn,mlp", "data.batch_size=4,8", "seed=1", "hydra.sweep.dir=out/s"]
    line = compose_command_line(words, multirun=True)
    assert line.folder == Path("out/s")
    expected = [(model, size) for model in ("cnn", "mlp") for size in (4, 8)]
    assert line.labels == [f"model={model} data.batch_size={size}" for model, size in expected]
    classes = {"SimpleCNN": "cnn", "MLP": "mlp"}
    seen = [(classes[c["model"]["_target_"].rpartition(".")[2]], c["data"]["batch_size"]) for c in line.configs]
    assert seen == expected


def test_a_run_of_a_sweep_has_its_switches_as_people_write_them() -> None:
    line = compose_command_line(["seed=1", "test=False", "data.augment.flip=true,false"], multirun=True)
    words = [list(one.hydra.overrides.task) for one in line.compositions]
    assert words == [["seed=1", "test=false", f"data.augment.flip={on}"] for on in ("true", "false")]


def test_a_sweep_may_name_its_choices_by_a_pattern() -> None:
    configs = check("-m model=glob([cnn,ml*])")
    assert [config["model"]["_target_"].rpartition(".")[2] for config in configs] == ["SimpleCNN", "MLP"]


def test_a_later_word_for_an_option_takes_the_place_of_an_earlier_one() -> None:
    assert [config["seed"] for config in check("-m seed=1,2 seed=3,4")] == [3, 4]


@pytest.mark.parametrize("line", ["hydra.run.dir=/tmp/x", "hydra.run.dir=out/${now:%H}/${data.batch_size}"])
def test_a_folder_may_be_anywhere_that_is_named_outright(line: str) -> None:
    check(line)


@pytest.mark.parametrize("word", ["hydra.sweep.dir=there", "++hydra.sweep.dir=there", "hydra.sweep.dir=${now:%H}"])
def test_a_folder_that_is_named_is_told_from_the_installed_default(word: str) -> None:
    assert compose_command_line(["seed=1,2", word], multirun=True).folder_chosen
    assert not compose_command_line(["seed=1,2"], multirun=True).folder_chosen
    assert compose_command_line([word.replace("sweep", "run")], multirun=False).folder_chosen
    assert not compose_command_line([], multirun=False).folder_chosen


def test_a_folder_that_a_users_config_names_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "place.yaml").write_text("# @package _global_\nhydra:\n  sweep:\n    dir: there\n")
    use_config_dir(str(tmp_path))
    line = compose_command_line(["seed=1,2", "experiment=place"], multirun=True)
    assert (line.folder, line.folder_chosen) == (Path("there"), True)


# --- a configuration that was composed earlier -----------------------------------------------------------------------


def changed(*overrides: str) -> dict:
    """A configuration as a record holds it, with options changed."""
    return check_config(apply_overrides(composed(), list(overrides)))


def test_options_of_a_record_are_set_added_and_taken_out() -> None:
    config = changed("trainer.profiler=simple", "++data.batch_size=8", "~data.num_val")
    assert (config["trainer"]["profiler"], config["data"]["batch_size"]) == ("simple", 8)
    assert "num_val" not in config["data"]


@pytest.mark.parametrize("text", ["logger=null", "~logger"])
def test_a_collection_is_left_out_of_a_record(text: str) -> None:
    assert changed(text)["logger"] is None


@pytest.mark.parametrize(
    "line",
    ["model=mlp model.hidden_sizes=[8]", "model.hidden_sizes=[8] model=mlp", "model=mlp model={hidden_sizes:[8]}"],
)
def test_a_choice_replaces_a_section_whatever_the_order(line: str) -> None:
    assert changed(*line.split())["model"] == composed(*line.split())["model"]


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
    compose(line)
    again, by_hydra = compose(line), composed_by_hydra(line)
    assert plain(again) == plain(by_hydra)
    assert OmegaConf.is_struct(again)
    assert again.hydra.run.dir == by_hydra.hydra.run.dir or "${now:" in plain(by_hydra)["hydra"]["run"]["dir"]


def test_what_is_set_in_one_does_not_reach_the_next() -> None:
    first = compose(["seed=1"])
    first.model.hidden_size = 3
    assert plain(compose(["seed=2"])) == plain(composed_by_hydra(["seed=2"]))


def test_knows_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compose([])
    monkeypatch.chdir(tmp_path)
    assert compose([]).hydra.runtime.cwd == str(tmp_path)
