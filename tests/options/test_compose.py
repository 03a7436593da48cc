"""A command line is checked before anything is imported or written: what a user did wrong is one line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from batchscope.errors import UserError
from batchscope.options.check import check_config
from batchscope.options.compose import apply_overrides, check_command_line, compose_command_line
from batchscope.options.groups import CONFIGS, use_config_dir
from batchscope.options.overrides import as_override
from batchscope.options.signatures import is_installed

# command line → what the one line of the answer must hold
MISTAKES = {
    "modle=cnn": ["modle", "Did you mean 'model'?"],
    "data.batch_sise=3": ["data.batch_sise", "Did you mean 'batch_size'?"],
    "+data.batch_sise=3": ["data.batch_sise", "Did you mean 'batch_size'?"],
    "++data.batch_sise=3": ["data.batch_sise", "Did you mean 'batch_size'?"],
    "+foo=3": ["foo: no such option"],
    "+trainer.max_epoch=3": ["Did you mean 'max_epochs'?"],
    "trainer.min_epochs=2": ["write +trainer.min_epochs=…"],
    "+batch_size=3": ["Did you mean 'data.batch_size'?"],
    "trainer.lr=0.1": ["Did you mean 'optimizer.lr'?"],
    "checkpoint.every_minutes=3": ["Did you mean 'callbacks.checkpoint.every_minutes'?"],
    "hydra.swep.dir=x": ["hydra.swep.dir", "Did you mean 'sweep'?"],
    "hydra.callbacks.x=1": ["hydra.callbacks.x: no such option."],
    "model=foo": ["model: got 'foo'", "cnn, lstm_cell, mlp, rnn_cell, stacked_lstm, torchvision"],
    "model=3": ["model: got 3", "takes cnn"],
    "model={a:1}": ["model"],
    "model=cn": ["Did you mean 'cnn'?"],
    "model=null": ["model: got null", "takes cnn"],
    "model=": ["model: got ''", "takes cnn"],
    "~model": ["model: got null", "cnn"],
    "model=[cnn,mlp]": ["model=[cnn,mlp]: model takes one choice; write -m model=a,b"],
    "-m data=[mnist,digits]": ["data takes one choice"],
    "experiment=foo": ["experiment: got 'foo'", "quickstart"],
    "+model=cnn": ["model: is chosen already; write model=… without the plus"],
    "+data.batch_size=3": ["data.batch_size: is set already; write data.batch_size=… without the plus"],
    "~data.batch_sise": ["Did you mean 'batch_size'?"],
    "~data.batch_size": ["data.batch_size: is missing"],
    "~test": ["test: is missing"],
    "~trainer.limit_val_batches": ["trainer.limit_val_batches: is null, which leaves nothing to delete"],
    "+trainer.limit_val_batches=3 data.batch_sise=3": ["data.batch_sise: no such option"],
    "search.start=3": ["search.start: no such option. search is null, not a section."],
    "search={start:0}": ["search.start: got 0, takes a whole number of at least 1"],
    "experiment=diagnose search.batch_factors=[0]": ["search.batch_factors: got [0], takes a list, each item"],
    "search={max:3}": ["search.max: no such option."],
    "seed.foo=3": ["seed.foo: no such option. seed is a value, not a section."],
    "seed=1,2": ["seed: got several values, takes one; write batchscope train -m … to run each of them"],
    "callbacks=null callbacks.throughput.calibrate=false": [
        "callbacks.throughput.calibrate: there is no callbacks section to set it in; callbacks=null leaves"
    ],
    "+callbacks.bsf._target_=lightning.pytorch.callbacks.BatchSizeFinder": ["experiment=find_batch_size"],
    "hydra/launcher=joblib": ["hydra/launcher: joblib is not installed; pip install 'batchscope[joblib]'"],
    "hydra/sweeper=optuna": ["hydra/sweeper: optuna is not installed; pip install 'batchscope[optuna]'"],
    "hydra/launcher=joblab": ["hydra/launcher: got 'joblab', takes basic"],
    "data.batch_size=0": ["data.batch_size: got 0, takes a whole number of at least 1"],
    "data.batch_size=abc": ["got 'abc'"],
    "data.batch_size=2.5": ["got 2.5"],
    "data.batch_size=null": ["got null"],
    "data.batch_size=": ["got nothing"],
    "data.batch_size=true": ["got True"],
    "data.batch_size=[1,2]": ["got [1, 2]"],
    "data.pipeline=memry": ["takes memory or device or workers", "Did you mean 'memory'?"],
    "data.batch_size=???": ["data.batch_size: has no value; write data.batch_size=…"],
    "data.root=???": ["data.root: has no value"],
    "model._target_=nowhere.Net": ["model._target_: nowhere.Net cannot be imported: there is no module 'nowhere'."],
    "optimizer.lr=-1": ["optimizer.lr: got -1, takes a number above 0"],
    "optimizer.lr=nan": ["optimizer.lr"],
    "optimizer.betas=[0.9,2]": ["optimizer.betas: got [0.9, 2], takes a list, each item a number from 0 to 1"],
    "compile=fast": ["compile: got 'fast', takes true or false or default, reduce-overhead"],
    "seed=99999999999": ["takes a whole number from 0 to 4,294,967,295"],
    "test=maybe": ["takes true or false"],
    "model=cnn data=adding": ["SimpleCNN reads image data", "models that read it: lstm_cell, rnn_cell, stacked_lstm"],
    "data.root=${nothing.here}": ["nothing"],
    "hydra.run.dir=../x": ["hydra.run.dir: got '../x'", "a folder below this one, or an absolute path"],
    "data.root=../../x hydra.run.dir=outputs/${data.root}": ["hydra.run.dir: got 'outputs/../../x'"],
    "hydra.run.dir=${nothing.here}": ["hydra.run.dir", "nothing"],
    "hydra.run.dir=null": ["hydra.run.dir"],
    f"hydra.run.dir=outputs/{'x' * 300}": ["hydra.run.dir: has a name of more than 255 bytes"],
    # A sweep is refused for any value in it, and no run is led out of its folder.
    "-m data.batch_size=64,0": ["data.batch_size: got 0"],
    "-m data.batch_size=0,64": ["data.batch_size: got 0"],
    "-m model=cnn,foo": ["model: got 'foo'"],
    "-m model=cnn data=mnist,adding": ["SimpleCNN reads image data"],
    "-m hydra.sweep.dir=../x": ["hydra.sweep.dir: got '../x'"],
    "-m hydra.sweep.subdir=../${hydra.job.num}": ["hydra.sweep.subdir: got '../0'", "below the sweep's"],
    "-m hydra.sweep.subdir=/tmp/${hydra.job.num}": ["hydra.sweep.subdir: got '/tmp/0'"],
    "-m data.root=a,../../b hydra.sweep.subdir=${data.root}": ["hydra.sweep.subdir: got '../../b'"],
    "-m data.root=a,../../b hydra.sweep.subdir=${hydra.job.override_dirname}": ["hydra.sweep.subdir: got"],
}


def check(line: str) -> list[dict]:
    words = line.split()
    return check_command_line([word for word in words if word != "-m"], multirun="-m" in words)


@pytest.mark.parametrize("line", MISTAKES, ids=str)
def test_a_mistake_is_one_line_that_names_the_option_and_what_it_takes(line: str) -> None:
    with pytest.raises(UserError) as caught:
        check(line)
    message = str(caught.value)
    assert all(part in message for part in MISTAKES[line]), message
    assert "\n" not in message
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("line", ["data.batch_size=[1", "=3", "data.batch_size", "a=b=c{", "seed=1,"])
def test_a_command_line_that_cannot_be_parsed_has_exit_code_2(line: str) -> None:
    with pytest.raises(UserError, match="cannot be parsed") as caught:
        check(line)
    assert caught.value.exit_code == 2


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
    config = check_command_line(["data=mnist", as_override("data.root", text)], multirun=False)[0]
    assert config["data"]["root"] == text


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


def test_checking_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; from batchscope.options.compose import check_command_line; check_command_line(['model=torchvision'], False)"
        "; print([m for m in ('torch', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    recorded = check_command_line([], multirun=False)[0]
    return check_config(apply_overrides(recorded, list(overrides)))


def test_options_of_a_record_are_set_added_and_taken_out() -> None:
    config = changed("trainer.profiler=simple", "++data.batch_size=8", "~data.num_val")
    assert (config["trainer"]["profiler"], config["data"]["batch_size"]) == ("simple", 8)
    assert "num_val" not in config["data"]


@pytest.mark.parametrize("text", ["logger=null", "~logger"])
def test_a_collection_is_left_out_of_a_record(text: str) -> None:
    assert changed(text)["logger"] is None


def test_a_choice_replaces_a_section() -> None:
    assert changed("model=mlp", "model.hidden_sizes=[8]")["model"]["hidden_sizes"] == [8]


WRONG = "data.batch_sise=3 +data.batch_sise=3 ~data.batch_sise +data.batch_size=3 ~modle seed.foo=3"
WRONG += " +trainer.profiler=foo model=foo model=null foo=1 ~data.batch_size ~model data.batch_size model@x=cnn seed=1,"


@pytest.mark.parametrize("text", WRONG.split())
def test_what_is_wrong_with_an_option_is_said_as_for_a_new_run(text: str) -> None:
    def message(call: Callable[[], object]) -> tuple[str, int]:
        with pytest.raises(UserError) as caught:
            call()
        return str(caught.value), caught.value.exit_code

    assert message(lambda: changed(text)) == message(lambda: check(text))


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
    with pytest.raises(UserError, match=said):
        changed(text)
