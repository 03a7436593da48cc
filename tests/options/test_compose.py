"""A command line is composed into the checked configurations of its runs, before anything is imported or written.

Refusals are tested in tests/cli/test_command_lines.py.
"""

import re
import shlex
from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from batchscope import _system
from batchscope._system import command_line
from batchscope.options.check import check_config
from batchscope.options.command_lines import for_explanation, for_timing
from batchscope.options.compose import (
    apply_overrides,
    check_command_line,
    choices_after,
    choices_in,
    compose,
    compose_command_line,
    words_for_hydra,
)
from batchscope.options.groups import CONFIGS, choices_of, config_dir, nodes_of_configs, use_config_dir
from batchscope.options.habits import HABITS, answer_to
from batchscope.options.signatures import is_installed
from tests.support.command_lines import composed, refusal
from tests.support.own_package import NET, Write

YAMLS = sorted([*CONFIGS.glob("*/*.yaml"), *CONFIGS.glob("hydra/*/*.yaml")])


def test_every_yaml_begins_with_the_command_that_uses_it() -> None:
    """docs/check.py composes these commands."""
    for file in YAMLS:
        lines, (group, *_) = file.read_text().splitlines(), file.relative_to(CONFIGS).parts
        command = lines[1] if lines[0].startswith("# @package") else lines[0]
        assert command.startswith("# python train.py "), file
        assert file.stem == "default" or group == "hydra" or f"{group}={file.stem}" in command.split(), file
        if group == "hydra":  # of launchers that may not be installed
            OmegaConf.load(file)


# --- the runs of a sweep, and folders --------------------------------------------------------------------------------

TESTED = ("true", "false")
# A sweep, the options of all its runs, and the label of each run.
SWEEPS = [
    ("seed=1 test=true,false model=cnn,mlp", "seed=1", [f"test={a} model={b}" for a in TESTED for b in ("cnn", "mlp")]),
    ("test=False seed=1,2", "test=false", ["seed=1", "seed=2"]),
    ("seed=1,2 seed=0,4", "", ["seed=0", "seed=4"]),
    ("seed=1,2 ++seed=0,4", "", ["++seed=0", "++seed=4"]),
    ("data.batch_size=8,16 model=cnn,mlp data={batch_size:4}", "data={batch_size:4}", ["model=cnn", "model=mlp"]),
    (
        "data=mnist,adding data={batch_size:4} model=rnn_cell,lstm_cell data=copy_memory",
        "data={batch_size:4} data=copy_memory",
        ["model=rnn_cell", "model=lstm_cell"],
    ),
]


@pytest.mark.parametrize(("line", "fixed", "labels"), SWEEPS)
def test_a_sweep_has_a_run_for_each_combination_as_people_write_it(line: str, fixed: str, labels: list[str]) -> None:
    sweep = compose_command_line(line.split(), multirun=True)
    runs = [[*fixed.split(), *label.split()] for label in labels]
    assert sweep.labels == labels
    assert [sorted(composition.hydra.overrides.task) for composition in sweep.compositions] == [*map(sorted, runs)]
    assert sweep.configs == [composed(*run) for run in runs]
    assert all(config["data"]["seed"] == config["seed"] for config in sweep.configs)


def test_hydra_adds_an_option_that_not_every_run_of_a_sweep_has_listed() -> None:
    words = ["optimizer=adamw,sgd", "optimizer.lr=1", "tags=[a]", "seed=1,2"]
    added = ["optimizer.fused=false", "trainer={min_epochs: 2}"]
    assert words_for_hydra([*words, *added]) == [*words, *(f"++{word}" for word in added)]


FOLDERS = {
    "hydra.run.dir=/tmp/x": "/tmp/x",
    "hydra.run.dir=out/of-${data.batch_size}": "out/of-128",
    "-m seed=1,2 hydra.sweep.dir=there": "there",
    "-m seed=1,2 ++hydra.sweep.dir=there": "there",
    "-m seed=1,2 experiment=place": "mine",
    "-m seed=1,2": None,
    "": None,
}


def test_a_choice_whose_class_an_option_replaces_names_it_no_more() -> None:
    (composition,) = compose_command_line(
        ["model=mlp", "task._target_=batchscope.training.task.Task"], False
    ).compositions
    choices = choices_in(composition.hydra)
    assert (choices["model"], choices["data"]) == ("mlp", "mnist")
    assert "task" not in choices


def test_the_choices_of_a_record_are_those_after_the_options_that_change_it() -> None:
    recorded = {"model": "cnn", "task": "default", "optimizer": None}
    assert choices_after(recorded, ["model=mlp", "task._target_=mynet.Task", "data={num_train: 5}"]) == {"model": "mlp"}


@pytest.mark.parametrize("folder", ["/home/jörg/my data", r"C:\Users\JRGMLL~1\größe", "/a&b;c", "runs/lr=0.1"])
def test_a_folder_needs_no_quotes_for_a_sign_that_hydra_does_not_take(folder: str) -> None:
    for word in (f"data.root={folder}", f"++data.root={folder}"):
        sweep = compose_command_line([word, "seed=1,2"], multirun=True)
        assert [config["data"]["root"] for config in sweep.configs] == [folder, folder]


def test_a_folder_of_the_network_keeps_both_backslashes(monkeypatch) -> None:
    monkeypatch.setattr(_system, "NETWORK_PATHS", True)
    assert composed(r"data.root=\\nas\mnist")["data"]["root"] == r"\\nas\mnist"


def test_a_folder_that_is_named_is_told_from_the_installed_default(package: Write) -> None:
    package({"experiment/place": "# @package _global_\nhydra:\n  sweep:\n    dir: mine\n"})
    use_config_dir("conf")
    for line, folder in FOLDERS.items():
        command_line = compose_command_line(line.removeprefix("-m").split(), multirun=line.startswith("-m"))
        assert command_line.is_folder_chosen is (folder is not None), line
        assert folder in (str(command_line.folder), None)


# --- a LightningModule has options of its own ------------------------------------------------------------------------

LIT = """
import lightning

class Validated(lightning.LightningModule):
    def validation_step(self, batch, batch_idx):
        pass

class Lit(Validated):
    def __init__(self, lr: float = 0.1, part: object = None):
        super().__init__()

class Other(Validated):
    def __init__(self, learning_rate: float = 0.1):
        super().__init__()

class Bare(Validated):
    def __init__(self, optimizer: object = None):
        super().__init__()

class Unchecked(lightning.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()

class Trains(lightning.LightningDataModule):
    def train_dataloader(self):
        pass

class Validates(Trains):
    def __init__(self):
        super().__init__()
        self.val_dataloader = self.train_dataloader
"""
NESTED = "optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.1}"
# A model config, and the full name of its learning rate option.
RATES = {
    "_target_: mynet.lit.Lit\nlr: 0.1": "model.lr",
    "_target_: mynet.lit.Lit\npart: {lr: 1}": "model.lr",
    "_target_: mynet.lit.Other\nlearning_rate: 0.1": "model.learning_rate",
    f"_target_: mynet.lit.Bare\n{NESTED}": "model.optimizer.lr",
}
UNREAD = ["optimizer.lr=0.1", "optimizer=sgd", "task.loss=mse", "channels_last=false"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=[pytest.mark.slow] * (option == "model.lr" and "part" in text))
        for text, option in RATES.items()
    ],
)
def test_a_sweep_of_a_config_over_the_rate_is_one_over_the_rate_that_the_model_reads(text: str, package: Write) -> None:
    package({"model/lit": text}, lit=LIT)
    use_config_dir("conf")
    option, find = RATES[text], ["model=lit", "experiment=find_lr"]
    line = compose_command_line(find, multirun=True)
    assert line.labels == [f"{option}={rate}" for rate in ("0.0003", "0.001", "0.003", "0.01", "0.03", "0.1")]
    assert "optimizer" not in line.configs[0]
    assert compose_command_line(line.words, multirun=True).labels == line.labels
    typed = compose_command_line([*find, f"{option}=0.5,1"], multirun=True)
    assert typed.labels == [f"{option}=0.5", f"{option}=1"]
    message = refusal(compose_command_line, ["model=lit", "optimizer.lr=0.1,0.2"], multirun=True)
    assert message.endswith(f" is a LightningModule, which has its own optimizer; its rate is {option}")


# A model and data, and the reason why they have no validation.
UNVALIDATED = {
    "model=lit data=trains": "Trains has no val_dataloader",
    "model=unchecked data=validates": "Unchecked has no validation_step",
    "model=cnn trainer.limit_val_batches=0": "trainer.limit_val_batches=0 leaves out the validation",
    "model=lit data=validates": "",
    "model=lit data=trains test=true": "",  # which says it then
}


@pytest.mark.parametrize("words", UNVALIDATED)
def test_a_search_for_a_rate_without_a_validation_is_refused_before_it_begins(words: str, package: Write) -> None:
    names = {"model/lit": "Lit", "model/unchecked": "Unchecked", "data/trains": "Trains", "data/validates": "Validates"}
    package({file: f"_target_: mynet.lit.{name}" for file, name in names.items()}, lit=LIT)
    use_config_dir("conf")
    line, missing = [*words.split(), "experiment=find_lr"], UNVALIDATED[words]
    if missing:
        message = f"optimizer.lr: a validation says which rate is the best, and {missing}"
        assert refusal(compose_command_line, line, multirun=True) == message
    else:
        assert len(compose_command_line(line, multirun=True).labels) == 6


def test_an_option_of_a_sweep_is_read_by_a_run_and_one_that_tells_runs_apart_by_each(package: Write) -> None:
    package({"model/lit": "_target_: mynet.lit.Lit\nlr: 0.1"}, lit=LIT)
    use_config_dir("conf")
    lit, cnn = compose_command_line(["model=lit,cnn", "optimizer.lr=0.2"], multirun=True).configs
    assert "optimizer" not in lit and cnn["optimizer"]["lr"] == 0.2
    message = "optimizer.lr: Lit is a LightningModule, which has its own optimizer; its rate is model.lr"
    assert refusal(compose_command_line, ["model=lit,cnn", "optimizer.lr=0.2,0.3"], multirun=True) == message
    words = ["optimizer.schedule=step,cosine", "optimizer.step_epochs=2"]
    assert [run["optimizer"]["step_epochs"] for run in compose_command_line(words, multirun=True).configs] == [2, 2]
    assert composed("experiment=diagnose", "data.num_workers=4")["data"]["num_workers"] == 4  # tries other pipelines


@pytest.mark.parametrize("word", UNREAD)
def test_what_a_model_does_not_read_is_refused_beside_its_record_too(word: str, package: Write) -> None:
    package({"model/lit": "_target_: mynet.lit.Lit\nlr: 0.1"}, lit=LIT)
    use_config_dir("conf")
    saved = composed("model=lit")
    for config in (saved, for_explanation(saved), for_timing(saved, 1.0)):
        assert check_config(config).keys().isdisjoint({"task", "optimizer", "channels_last"})
    assert refusal(lambda: check_config(apply_overrides(saved, [word]))) == refusal(composed, "model=lit", word)


def test_a_class_that_is_typed_over_a_config_leaves_out_what_that_sets_for_another_one(package: Write) -> None:
    net = "class Net:\n    def __init__(self, width: int = 3, kernel_size: int = 1): pass\nclass Other(Net): pass\n"
    inherits = "defaults: [cnn, _self_]\n_target_: mynet.net.Net\n"
    package({"model/inherits": inherits, "model/wrong": "_target_: mynet.net.Other\nnorm: null\n"}, net=net)
    use_config_dir("conf")
    node = {"_target_": "mynet.net.Net", "kernel_size": 3}
    for words in (["model._target_=mynet.net.Net"], ["model=inherits"]):
        saved = composed(*words, "data._target_=mynet.net.Net", "~data.batch_size")
        assert (saved["model"], saved["data"]) == (node, {"_target_": "mynet.net.Net"})
        for typed in ("model.norm=null", "model.hidden_size=128", "model.hidden_size=3"):
            assert refusal(composed, *words, typed).startswith(f"{typed.partition('=')[0]}: no such option. ")
            assert refusal(apply_overrides, saved, [typed]).startswith(f"{typed.partition('=')[0]}: no such option. ")
    assert refusal(composed, "model=wrong").startswith("model.norm: no such option. ")
    word = ["model._target_=mynet.net.Net", "model.width=1,2"]
    assert [config["model"] for config in check_command_line(word, True)] == [node | {"width": n} for n in (1, 2)]


# --- a configuration that was composed earlier -----------------------------------------------------------------------


def changed(*overrides: str) -> dict:
    """Apply overrides to a recorded configuration."""
    return check_config(apply_overrides(composed(), list(overrides)))


CHANGES = [
    *("trainer.max_epochs=null", "trainer.limit_train_batches=0.5", "trainer.val_check_interval=00:00:10:00"),
    *("trainer.precision=bf16-mixed", "trainer.precision=32", "trainer.deterministic=warn", "trainer.profiler=simple"),
    *("trainer.fast_dev_run=true", "trainer.max_time={hours:1}", "++data.batch_size=8", "~data.num_val"),
    *("~callbacks", "logger=null", "model={hidden_size:3}"),
    *("model=mlp model.hidden_sizes=[8]", "model.hidden_sizes=[8] model=mlp", "model=mlp model={hidden_sizes:[8]}"),
    *("task.metrics.acc=null", "trainer.min_epochs=2", "task.metrics.mean={_target_:torchmetrics.MeanMetric}"),
]


def test_a_class_in_place_of_a_text_needs_no_plus_in_any_order() -> None:
    target = "trainer.strategy._target_=lightning.pytorch.strategies.DDPStrategy"
    option = "+trainer.strategy.find_unused_parameters=true"
    (first,), (last,) = (check_command_line(words, False) for words in ([target, option], [option, target]))
    assert first == last
    assert first["trainer"]["strategy"]["find_unused_parameters"] is True


@pytest.mark.parametrize("interval", ["00:00:10:00", "{hours:1}"])
def test_several_processes_validate_by_no_clock(interval: str) -> None:
    words = ["trainer=ddp", f"+trainer.val_check_interval={interval}", "+trainer.check_val_every_n_epoch=null"]
    assert composed(*words, "trainer.devices=1")["trainer"]["val_check_interval"]
    message = (
        "trainer.val_check_interval: is a time, and the clocks of several processes differ; write a number of batches"
    )
    assert refusal(composed, *words, "trainer.devices=2") == message


@pytest.mark.parametrize("line", CHANGES)
def test_an_option_does_to_a_record_what_it_does_to_a_new_run(line: str) -> None:
    assert changed(*line.split()) == composed(*line.split()) != composed()


WRONG = "data.batch_sise=3 +data.batch_sise=3 ~data.batch_sise +data.batch_size=3 ~modle seed.foo=3"
WRONG += " +trainer.profiler=foo model=foo model=null foo=1 ~data.batch_size ~model data.batch_size model@x=cnn seed=1,"


@pytest.mark.parametrize("text", WRONG.split())
def test_what_is_wrong_with_an_option_is_said_as_for_a_new_run(text: str) -> None:
    assert refusal(changed, text) == refusal(composed, text)


def test_a_choice_of_the_trainer_sets_the_devices_of_a_record_and_keeps_its_other_options(package: Write) -> None:
    package({"trainer/mine": "defaults: [default, _self_]\naccelerator: cpu\nprecision: 64-true\n"})
    use_config_dir("conf")
    saved = composed("trainer=ddp", "trainer.devices=4", "trainer.max_epochs=50", "trainer.precision=bf16-mixed")
    on_cpu = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    for choice, changes in (("cpu", on_cpu), ("mine", on_cpu | {"precision": "64-true"})):
        assert check_config(apply_overrides(saved, [f"trainer={choice}"]))["trainer"] == saved["trainer"] | changes


def test_what_belongs_to_a_new_run_is_refused() -> None:
    assert refusal(changed, "seed=1,2") == "seed: got several values, takes one"
    for option in ("experiment=quickstart", "hydra.run.dir=x", "hydra/launcher=ray", "model/part=a"):
        reason = "is for a new run; here, name the options to change: trainer.accelerator=cpu"  # which all take
        assert refusal(changed, option) == f"{option.partition('=')[0]}: {reason}"


# --- a composition whose choices were composed before is the one that Hydra composes ---------------------------------

LINES = [
    "",
    "data=copy_memory model=lstm_cell model.hidden_size=8 data.delay=3 seed=7",
    "experiment=mnist_99 +trainer.max_time={hours:1} ~trainer.precision model.hidden_size=5 model={hidden_size:3}",
    "logger=none ~callbacks.device callbacks.progress=null callbacks=[early_stopping,weight_averaging]",
    "++trainer.limit_val_batches=2 optimizer.lr=${model.hidden_size} tags=['a\tb']",
    "hydra.run.dir=out/${hydra.job.override_dirname} seed=3 data.batch_size=4 hydra/launcher=basic",
    "hydra.job.config.override_dirname.exclude_keys=[seed] seed=3 hydra.sweep.subdir=${hydra.job.num}",
]


@pytest.mark.parametrize("line", [line.split(" ") if line else [] for line in LINES], ids=" ".join)
def test_is_what_hydra_composes_also_in_another_folder(line, tmp_path, monkeypatch) -> None:
    compose(line).model.hidden_size = 17  # an override of one composition does not leak into the next
    monkeypatch.chdir(tmp_path)
    again = compose(line)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        by_hydra = hydra.compose("train", line, return_hydra_config=True)
    plain = OmegaConf.to_container(by_hydra, resolve=False)
    assert OmegaConf.to_container(again, resolve=False) == plain
    assert OmegaConf.is_struct(again)
    assert again.hydra.run.dir == by_hydra.hydra.run.dir or "${now:" in plain["hydra"]["run"]["dir"]


# --- the configs of --config-dir -------------------------------------------------------------------------------------

OF_THE_USERS = {
    "mynet": "did you mean 'model=mynet'?",
    "model=mynet +model.flavor=x": "Did you mean 'flavour'? model takes flavour, size.",
    "model=mynet model.flavour=5": "model.flavour: got 5, takes a text.",
    "model=mynet data=mnist": "model: Net reads sequence data, and MNIST serves image data; write another model=… or data=…",
    "experiment=own tags.5.lr=1": "tags.5.lr: no such option. tags.5 is no section.",
    "experiment=own tags.0.lr=1": "tags: got [{'first': 1, 'lr': 1}], takes a list, each item a text.",
}


def test_the_users_own_choices_and_options_are_answered_and_nothing_is_imported(package: Write) -> None:
    net = "open('ran', 'w')\n" + NET.replace("    def", "    accepts = ('sequence')\n    def")
    experiment = "# @package _global_\ntags: [{first: 1}]"
    package({"experiment/own": experiment, "model/broken": "{"}, net=net)
    use_config_dir("conf")
    for line, reason in OF_THE_USERS.items():
        assert reason in refusal(composed, *line.split()), line
    assert composed("model=mynet", "data=adding")["model"]["flavour"] == "salty"
    assert not Path("ran").exists()


def test_a_group_of_the_users_own_has_any_package(package: Write) -> None:
    node = {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor"}
    package({"own/a": f"mine: {node}\n", "own/b": f"{node}\n"})
    use_config_dir("conf")
    for word in ("+own@callbacks=a", "+own@callbacks.mine=b"):
        assert composed(word)["callbacks"]["mine"] == node, word


SWA = """
from lightning.pytorch import callbacks

class Mine(callbacks.StochasticWeightAveraging):
    pass

class StochasticWeightAveraging(callbacks.Callback):
    pass
"""


def test_a_callback_is_refused_for_the_class_that_it_comes_from_and_not_for_its_name(package: Write) -> None:
    package(swa=SWA)
    message = refusal(composed, "+callbacks.mine._target_=mynet.swa.Mine")
    assert message.startswith("callbacks.mine: StochasticWeightAveraging hands its average over")
    assert composed("+callbacks.mine._target_=mynet.swa.StochasticWeightAveraging")["callbacks"]["mine"]


OF_A_FILE = {
    "# @package _global_\nhydra: {sweeper: {params: {seed: '${oc.env:NOWHERE}'}}}": "hydra.sweeper.params.seed: ",
    "trainer: {max_epochs: 3}": "experiment: is no section; its YAML file begins with the line `# @package _global_`",
    "# @package _global_\nresume: there": "resume: is for the command line of one run alone: batchscope train resume=",
}


@pytest.mark.parametrize("text", OF_A_FILE)
def test_an_experiment_that_cannot_have_what_it_says_is_refused(text: str, package: Write) -> None:
    package({"experiment/own": text})
    use_config_dir("conf")
    assert refusal(composed, "experiment=own").startswith(OF_A_FILE[text])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("flavour: [1, 2\nmine: 3\n", "conf/model/own.yaml, line 2: cannot be read: expected ',' or ']', but got ':'"),
        ("a: b: c\n", "conf/model/own.yaml, line 1: cannot be read: mapping values are not allowed here"),
        ("a: 1\na: 2\n", "conf/model/own.yaml, line 2: cannot be read: found duplicate key a"),
        ("a: ${b\n", "conf/model/own.yaml: cannot be read: "),
        ("a: \udcff\n", "conf/model/own.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff in position 3"),
    ],
)
def test_a_file_of_the_users_that_cannot_be_read_is_named_with_its_line(text: str, reason: str, package: Write) -> None:
    package({})
    Path("conf/model/own.yaml").write_text(text, errors="surrogateescape")
    use_config_dir("conf")
    assert refusal(composed, "model=own").startswith(reason)


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("model/own", "mine: 1", "model"),
        ("model/own", "part: {mine: 1}", "model.part"),
        ("model/part/own", "mine: 1", "model.part"),
        ("callbacks/own", "watch: {mine: 1}", "callbacks.watch"),
        ("experiment/own", "# a comment\n# @package _global_\ndata: {augment: {mine: 1}}", "data.augment"),
        ("experiment/own", "# @package trainer.strategy\nmine: 1", "trainer.strategy"),
        ("data/own", "defaults: [/_own@_here_]", "data"),
    ],
)
def test_a_section_stands_where_its_file_says(file: str, text: str, key: str, package: Write) -> None:
    package({file: text, "_own": "mine: 1"})
    Path("conf/model/.#mynet.yaml").symlink_to("me@here.1")  # the lock file of an editor
    use_config_dir("conf")
    assert [name for name, nodes in nodes_of_configs().items() if any("mine" in node for node in nodes)] == [key]
    assert "mynet" in choices_of("model") and ".#mynet" not in choices_of("model")


@pytest.mark.parametrize(
    ("file", "defaults", "word", "named"),
    [
        ("callbacks/own", "[usual, _self_]", "callbacks=own", "callbacks/usual"),
        ("data/own", "[/_tensor@_here_, _self_]", "data=own", "_tensor"),
    ],
)
def test_a_wrong_name_in_a_list_of_defaults_is_named_with_its_file(
    file: str, defaults: str, word: str, named: str, package: Write
) -> None:
    package({file: f"defaults: {defaults}\n"})
    use_config_dir("conf")
    message = f"{file}.yaml: its defaults name '{named}', which is no YAML file of the configs"
    assert refusal(composed, word) == message


def test_a_folder_of_configs_may_hold_parts_of_a_group_alone_and_hides_no_installed_one(tmp_path: Path) -> None:
    (tmp_path / "own/model/encoder").mkdir(parents=True)
    (tmp_path / "own/model/encoder/small.yaml").write_text("width: 4\n")
    use_config_dir(str(tmp_path / "own"))
    assert config_dir() == tmp_path / "own"
    (tmp_path / "own/hydra/launcher").mkdir(parents=True)
    (tmp_path / "own/hydra/launcher/ray.yaml").touch()
    message = refusal(use_config_dir, str(tmp_path / "own"))
    assert message.endswith("ray.yaml has the name of an installed config; rename it")


@pytest.mark.parametrize("choice", ["throughput", "time_to_target target=0.9"])
def test_a_run_that_ends_by_itself_waits_for_no_epochs_of_the_experiment_beside_it(choice: str, package: Write) -> None:
    package({"experiment/own": "# @package _global_\ntrainer: {min_epochs: 10, max_epochs: 10}\n"})
    use_config_dir("conf")
    name, *options = choice.split()
    trainer = composed(f"experiment=[own,{name}]", *options)["trainer"]
    assert (trainer["min_epochs"], trainer["max_epochs"]) == (0, -1)


# --- callbacks and loggers are added to the default ones --------------------------------------------------------------

OWN_CALLBACKS = "checkpoint: {monitor: val_acc}\ndevice: null\nmine: {_target_: lightning.pytorch.callbacks.Timer}\n"
OWN_LOGGER = "mine: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: here}\n"


def test_a_file_of_the_users_is_merged_over_the_default_callbacks_and_loggers(package: Write) -> None:
    package({"callbacks/own": OWN_CALLBACKS, "logger/own": OWN_LOGGER})
    use_config_dir("conf")
    default, merged = composed(), composed("callbacks=[own,early_stopping]", "logger=own", "~callbacks.progress")
    expected = default["callbacks"] | {"device": None, "mine": {"_target_": "lightning.pytorch.callbacks.Timer"}}
    expected["checkpoint"] = {**expected["checkpoint"], "monitor": "val_acc"}
    expected["early_stopping"] = merged["callbacks"]["early_stopping"]
    del expected["progress"]
    assert merged["callbacks"] == expected
    assert [*merged["logger"]] == ["tensorboard", "csv", "mine"]


@pytest.mark.parametrize("path", ["${run_dir}", "${hydra:runtime.output_dir}"])
def test_a_file_of_the_users_that_names_the_runs_folder_is_told_where_it_is(path: str, package: Write) -> None:
    package({"logger/own": OWN_LOGGER.replace("here", f"'{path}/logs'")})
    use_config_dir("conf")
    message = refusal(composed, "logger=own")
    assert message.startswith(f"logger.mine.save_dir: got '{path}/logs', and the run's folder is no option; ")
    assert "leave it out of TensorBoard, CSV and W&B" in message and "trainer.default_root_dir" in message


@pytest.mark.parametrize(
    "value",
    [
        *("${oc.env:COMET_API_KEY}", "Bearer ${oc.env:hub_token,x}", "${oc.env:DB_PASSWORD}", "${oc.env:APIKEY}"),
        *("${oc.env:HFTOKEN}", "${oc.env:AWS_SECRETKEY}", "${oc.env:X_API_KEYS}"),
    ],
)
def test_a_secret_of_the_environment_is_refused_because_records_would_keep_it(value: str, package: Write) -> None:
    package({"logger/own": OWN_LOGGER.replace("here", f"'{value}'")})
    use_config_dir("conf")
    line = refusal(composed, "logger=own")
    assert line.startswith(f"logger.mine.save_dir: got '{value}', which would be kept in run.json and in checkpoints; ")


@pytest.mark.parametrize("name", ["TOKENIZER_DIR", "MONKEY_DIR", "MAX_TOKENS"])
def test_what_is_no_secret_may_come_from_the_environment(name: str, package: Write, monkeypatch) -> None:
    package({"logger/own": OWN_LOGGER.replace("here", f"'${{oc.env:{name}}}'")})
    use_config_dir("conf")
    monkeypatch.setenv(name, "there")
    assert composed("logger=own")["logger"]["mine"]["save_dir"] == "there"


def test_none_leaves_out_all_default_ones_and_a_choice_beside_it_is_alone() -> None:
    for group, choice in (("callbacks", "early_stopping"), ("logger", "csv")):
        no_values = dict.fromkeys(composed()[group])
        for words in (f"{group}=none", f"{group}=null", f"{group}=[]", f"~{group}"):
            assert composed(words)[group] == no_values, words
        assert [name for name, node in composed(f"{group}=[none,{choice}]")[group].items() if node] == [choice]


# --- words that are typed by habit -----------------------------------------------------------------------------------

PAGE = (CONFIGS.parent / "docs" / "commands.md").read_text(encoding="utf-8").partition("## Coming from")[2]
SAME = PAGE.partition("work as there:")[2].partition("\n\n")[0]
ANSWERS = {
    word if "=" in word else f"{word}=7": text.replace("*", "7").replace("`", "") for word, text in HABITS.items()
}
ANSWERS |= {
    "model.optimizer.lr=0.1": "write optimizer=adam",
    "+trainer.gpus=2": "write trainer.accelerator=gpu trainer.devices=2",
    "trainer.gpus=[0,1]": f"write trainer.accelerator=gpu {command_line(['trainer.devices=[0,1]'])}",
    "task_name=my run": f"write {command_line(['hydra.run.dir=outputs/runs/my run'])} to name the run's folder",
    "task_name=7": f"write hydra.run.dir=outputs/runs/7 to name the run's folder, or {command_line(['tags=[7]'])}",
    "+extras.ignore_warnings=true": "there is nothing like it",
    "callbacks.model_checkpoint.save_top_k=3": "write callbacks.checkpoint with monitor, mode",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_a_word_typed_by_habit_is_answered_with_its_value_and_stands_for_what_is_below_it(word: str) -> None:
    option = (
        word
        if word in HABITS and "." not in word
        else word.lstrip("+").partition("=")[0].removesuffix(".ignore_warnings")
    )
    assert refusal(composed, word).startswith(f"{option}: {ANSWERS[word]}")
    assert answer_to("model.hidden_size", "3") is None


def test_the_page_has_every_answer() -> None:
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE, re.MULTILINE))
    assert rows == {word: text.replace("*", "…") for word, text in HABITS.items()}


def test_data_are_looked_for_by_the_option_that_the_chosen_data_have(package: Write) -> None:
    net = NET + "\n\nclass Photos:\n    def __init__(self, folder: str):\n        pass\n"
    package({"data/photos": "_target_: mynet.net.Photos\n"}, net=net)
    use_config_dir("conf")
    assert refusal(composed, "data=photos", "paths.data_dir=/there") == "paths.data_dir: write data.folder=/there"
    assert refusal(composed, "data=photos", "data.data_dir=/there") == "data.data_dir: write data.folder=/there"
    for option in ("paths.data_dir", "data.data_dir"):
        message = f"{option}: these data read no folder"
        assert refusal(composed, "data=adding", "model=lstm_cell", f"{option}=/there") == message


def test_data_of_a_classmethod_whose_options_nobody_can_read_need_no_batch_size(package: Write) -> None:
    net = NET + "\n\nclass Photos:\n    @classmethod\n    def load(cls, folder='x'): return cls()\n"
    package({"data/photos": "_target_: mynet.net.Photos.load\n"}, net=net)
    use_config_dir("conf")
    assert composed("data=photos")["data"] == {"_target_": "mynet.net.Photos.load"}


SEARCH = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 1,2\n"


def test_a_search_of_the_users_own_is_used(package: Write) -> None:
    package({"hparams_search/mine": SEARCH})
    use_config_dir("conf")
    line = compose_command_line(["hparams_search=mine"], multirun=True)
    assert line.labels == ["seed=1", "seed=2"]
    assert line.words == ["seed=1,2", "hparams_search=mine", "hydra.sweeper.params=null"]  # for another launcher
    assert refusal(composed, "hparams_search=other") == "hparams_search: got 'other', takes mine."


@pytest.mark.parametrize("words", re.findall("`([^`]+)`", SAME))
def test_what_the_page_says_to_work_as_elsewhere_works(words: str) -> None:
    if any(name in words and not is_installed(name) for name in ("wandb", "optuna")):
        pytest.skip("needs an extra")
    compose_command_line([word for word in shlex.split(words) if word != "-m"], multirun="-m" in words.split())
