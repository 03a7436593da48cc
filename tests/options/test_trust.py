"""A file may set numbers and switches; the command line decides on classes, output paths and downloads."""

import copy
import shlex
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.checkpointing import resume
from batchscope.errors import UserError
from batchscope.options import trust
from batchscope.options.check import check_config
from batchscope.options.command_lines import evaluate_command, resume_command
from batchscope.options.compose import apply_overrides
from batchscope.options.groups import use_config_dir
from tests.support.command_lines import composed, refusal
from tests.support.own_package import Write

Own = Callable[..., dict[str, Any]]


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Copy a configuration with one option changed; missing sections are created."""
    copied = copy.deepcopy(config)
    section, _, last = key.rpartition(".")
    node = copied
    for part in section.split(".") if section else ():
        node[part] = node = node.get(part) or {}
    node[last] = value
    return copied


def resumed(config: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """Return the configuration with which the run in the folder `out` is resumed."""
    return resume.config_to_resume({"status": "interrupted", "config": config}, Path("out"), list(overrides))


# --- plain data ------------------------------------------------------------------------------------------------------

DEEP: Any = reduce(lambda node, _: [node], range(100_000), "x")
WIDE: Any = reduce(lambda node, _: [node] * 10, range(10), "x")
OF_NO_OPTION = "a value that no option has, of type "
NOT_PLAIN = {
    "holds no configuration": [None, [], "x", 5],
    "too many values or levels": [{"a": DEEP}, {"a": WIDE}],
    f"{OF_NO_OPTION}str": [{"a": text} for text in ("\0", "a\rb", "\x1b[2J", "\ud800", "x" * 5000)],
    f"{OF_NO_OPTION}int": [{"a": [number]} for number in (2**64, -(2**64), 10**5000)],
    OF_NO_OPTION: [{"a": [value]} for value in (torch.zeros(1), b"x", {1}, Path("x"))],
    "the name of an option": [{"a": [{key: 1}]} for key in (5, None, "", "a.b", "a b", "\x1b[2J", "x" * 200)],
    "for the command line alone": [{"a": text} for text in ("${oc.env:HOME}", "x${seed}", "${nowhere}")],
}


@pytest.mark.parametrize("reason", NOT_PLAIN)
def test_what_is_no_plain_configuration_is_refused(reason: str) -> None:
    for config in NOT_PLAIN[reason]:
        assert reason in refusal(trust.copy_plain, config, "f")


# --- what a file may decide ------------------------------------------------------------------------------------------

YAML = {
    "model/mynet": "defaults: [encoder: small, _self_]\n_target_: mynet.net.Net\nflavour: salty\nverbose: false\nsize: 3\n",
    "logger/sends": "sends: {_target_: lightning.pytorch.loggers.CometLogger}\n",
    "model/encoder/small": "_target_: mynet.net.Encoder\nact: {_target_: torch.nn.ReLU, _partial_: true}\nwidth: 4\n",
    "model/other": "_target_: mynet.net.Other\nflavour: sour\n",
    "model/lines": '_target_: mynet.net.Other\nflavour: "sour\\n\\tand sweet"\n',
    "model/layers": "_target_: torch.nn.Sequential\n_args_: [{_target_: torch.nn.Flatten}, {_target_: mynet.net.Head}]\n",
    "task/dice": "defaults: [default, _self_]\nloss: {_target_: mynet.net.Dice}\n",
    "optimizer/torchs": "_target_: torch.optim.SGD\nlr: 0.1\n",
    "experiment/mine": "# @package _global_\ndefaults: [override /model: mynet]\n"
    "callbacks: {mine: {_target_: mynet.net.Mine}}\nmodel: {flavour: spicy}\n",
}


@pytest.fixture
def own(package: Write) -> Own:
    """The configuration of a run of the user's own model, as its command line gives it; beside it the folder `out`."""
    classes = ("Net", "Other", "Encoder", "Head", "Mine", "Dice")
    package(YAML, net="".join(f"class {name}:\n    def __init__(self, **options): pass\n" for name in classes))
    use_config_dir("conf")
    Path("out").mkdir(exist_ok=True)
    return composed


REPEATED = [
    "model=other logger.tensorboard.version=3",
    "model=mynet model.size=5 optimizer.betas=[0.8,0.9] +trainer.deterministic=true",
    "model=layers test=false trainer.max_time={hours:1}",
    "model=lines",
    "experiment=mine trainer.max_epochs=7",
    "model=torchvision model.name=vgg11 trainer.precision=bf16-mixed trainer=ddp",
    "data=sequential_mnist model=lstm_cell data.steps=pixels callbacks.checkpoint.monitor=val/acc",
    "+trainer.val_check_interval='00:00:10:00' +trainer.check_val_every_n_epoch=null task.loss=mse",
    "trainer.devices=[0,1]",
    "task=dice task.freeze=[encoder.*] optimizer=torchs +optimizer.schedule=cosine",
    "experiment=time_to_target target=0.9 search.sizes=[8] hydra.sweep.dir=x trainer.profiler=simple",
]


def test_a_file_may_repeat_the_configs_set_numbers_and_choose(own: Own) -> None:
    for words in REPEATED:
        config = own(*shlex.split(words))
        assert resumed(config) == {**config, "resume": "out"}, words


SAVE_DIR = "logger.tensorboard.save_dir"
AWAY = [
    *("/elsewhere", "outside", "out/x", "out/../elsewhere", "out/a/.."),
    *("out/~/x", "out/$HOME", "s3://out/x", "out/file://x"),
    *("~/../{here}/out/x", "$PWD/../{here}/out"),
]
ELSEWHERE = {"task.loss": "mynet.net.Mine", "callbacks.mine": "mynet.net.Net", "trainer.strategy": "mynet.net.Net"}
ELSEWHERE |= {"model.encoder.width": "mynet.net.Encoder", "logger.csv": "lightning.pytorch.loggers.CometLogger"}
ELSEWHERE |= {"callbacks.curves": "lightning.pytorch.callbacks.ModelCheckpoint"}
# It would run a file.
HUB = {"_target_": "torch.hub.load", "repo_or_dir": "repo", "model": "f", "source": "local"}
ALONE = "in out/run.json, and a file alone does not decide that; to confirm it, "
OF_YAML = "add the --config-dir (in Python `config_dir=`) that has its YAML, or "
ADD, IN_PYTHON = "add", " (in Python to `overrides=[…]`)"
# A change to the record of `model=mynet`; the beginning of the refusal, if it does not name the option.
REFUSED: list[tuple[str, Any, str]] = [
    ("model._target_", "a.B", f"is 'a.B' {ALONE}{OF_YAML}{ADD} model._target_=a.B"),
    ("model._target_", "mynet.net.Encoder", ""),  # of another place
    ("model._target_", "mynet.net.Other", "model.flavour: is "),  # whose configs have another text
    ("model.flavour", "odd", f"is 'odd' {ALONE}{ADD} model.flavour=odd{IN_PYTHON}"),
    ("model.weights", "DEFAULT", ""),
    *(("model.trust_remote_code", value, "") for value in (True, 1, None, [1])),
    *(("model.verbose", value, "") for value in (True, 1, None)),
    ("optimizer.maximize", True, ""),
    ("logger.sends", {"_target_": "lightning.pytorch.loggers.CometLogger"}, "logger.sends._target_: is "),
    ("model.encoder._target_", "os.system", ""),
    ("model.encoder.act._partial_", False, ""),
    ("model.head", [{"_target_": "mynet.net.Head"}], ""),
    ("model._args_", [], ""),
    ("data", {"_target_": "mynet.net.Net", "batch_size": 1}, "data._target_: is "),
    ("task.metrics", {"a": {"_target_": "os.system"}}, "task.metrics.a._target_: is "),
    ("optimizer._target_", "mynet.net.Mine", ""),
    ("trainer.model_registry", "somebody/model", ""),
    ("trainer.plugins", ["it's", "a, b", None, True, 1.5], ""),
    *((place, {"_target_": target}, f"{place}._target_: is ") for place, target in ELSEWHERE.items()),
    *((f"{place}._args_", [HUB], "") for place in ("task", "optimizer", "data", "callbacks.curves", "logger.csv")),
    # In a list of names or numbers a node is none.
    ("task.freeze", [HUB], ""),
    ("task.freeze", ["a", HUB], ""),
    ("trainer.devices", [HUB], ""),
    ("data.root", "/a", f"is '/a' {ALONE}{ADD} data.root=/a{IN_PYTHON}"),
    ("logger.csv.save_dir", AWAY[0], ""),
    *(("logger.tensorboard.save_dir", path, "") for path in AWAY),
    ("logger.tensorboard.version", "/elsewhere", ""),
    ("logger.tensorboard.filename_suffix", "out/x", ""),
]


def test_a_file_alone_decides_nothing_else_and_typing_it_confirms_it(own: Own) -> None:
    config = own("model=mynet")
    Path("repo").mkdir()
    Path("repo/hubconf.py").write_text("open('ran', 'w')\ndef f(): pass\n")
    for key, value, refused in REFUSED:
        begins = refused if ": is " in refused else f"{key}: {refused or 'is '}"
        value = value.format(here=Path.cwd().name) if isinstance(value, str) else value
        hostile = changed(config, key, value)
        message = refusal(resumed, hostile)
        assert message.startswith(begins), (key, value, message)
        word = message.rpartition(f"{ADD} ")[2].removesuffix(IN_PYTHON)
        try:
            assert resumed(hostile, *shlex.split(word)) == {**hostile, "resume": "out"}
        except UserError as error:  # more has to be said
            assert not str(error).startswith(f"{begins.partition(': ')[0]}: "), (key, value, word)
    assert refusal(resumed, changed(config, "search", {"_target_": "os.system"})).startswith("search._target_: got ")
    assert not Path("ran").exists()


def test_without_the_configs_every_target_and_text_is_typed_and_one_line_has_all_words(own: Own) -> None:
    config = own("model=other")
    use_config_dir(None)
    Path("conf").rename("out/conf")  # a folder beside the record is not looked at
    message = refusal(resumed, config)
    assert message.startswith("model._target_: is 'mynet.net.Other' in out/run.json, and ")
    assert message.endswith(f" model._target_=mynet.net.Other model.flavour=sour{IN_PYTHON}")
    words = resume_command(config, Path("out"))
    assert words == "batchscope train resume=out model._target_=mynet.net.Other model.flavour=sour"
    assert resumed(config, *words.split()[3:])["model"] == config["model"]
    use_config_dir("out/conf")
    assert resume_command(config, Path("out")) == "batchscope train resume=out --config-dir=out/conf"
    assert evaluate_command(config, "a.ckpt").endswith(" ckpt=a.ckpt --config-dir=out/conf")
    assert resume_command(config, Path("last")).startswith("batchscope train resume=./last --config")  # not the newest
    layers = own("model=layers")
    layers["model"]["_args_"][1]["width"] = 5  # a list of nodes is repeated as a whole
    assert refusal(resumed, layers).startswith("model._args_: is [")


CONFIRMS = [f"{plus}logger.tensorboard={{save_dir: /elsewhere, version: 1}}" for plus in ("", "++")]
CONFIRMS += ["logger.tensorboard=null", "~logger.tensorboard", "logger=default", "logger=null"]
CONFIRMS_NOT = [f"{plus}logger.tensorboard={{version: 1}}" for plus in ("", "+", "++")]
CONFIRMS_NOT += ["logger.tensorboard={}", "~logger.tensorboard.version", "logger.csv=null"]
CONFIRMS_NOT += ["logger={tensorboard: {version: 1}}", "data=mnist", "data.root=/elsewhere"]


@pytest.mark.parametrize("word", [*CONFIRMS, *CONFIRMS_NOT])
def test_an_option_confirms_what_it_spells_out_or_replaces_alone(word: str, run_dir: Path) -> None:
    config = check_config(apply_overrides(changed(composed(), SAVE_DIR, "/elsewhere"), [word]))
    if word in CONFIRMS:
        trust.refuse_unconfirmed(config, [word], "f")
    else:
        assert refusal(trust.refuse_unconfirmed, config, [word], "f").startswith(f"{SAVE_DIR}: is '/elsewhere'")


def test_a_choice_of_the_trainer_confirms_no_option_that_it_keeps(run_dir: Path) -> None:
    plugin = "lightning.pytorch.plugins.AsyncCheckpointIO"
    config = changed(composed(), "trainer.plugins._target_", plugin)
    assert refusal(resumed, config, "trainer=cpu").startswith(f"trainer.plugins._target_: is '{plugin}'")


TEXTS = ["/a b", " a", "it's", 'say "so"', "x,y", "a=b", "[1]", "{a}", "", "x\\", "é", "#", "null", "true", "1e3"]


@pytest.mark.parametrize("value", TEXTS)
def test_a_typed_value_takes_the_place_of_the_files_as_a_shell_and_hydra_read_it(value: str, run_dir: Path) -> None:
    (word,) = shlex.split(trust.as_words("data.root", value))
    assert resumed(changed(composed(), "data.root", "/a"), word)["data"]["root"] == value


# --- the run's folder -------------------------------------------------------------------------------------------------


def test_a_link_out_of_the_folder_is_refused(run_dir: Path) -> None:
    config, name = composed(), "csv/metrics.csv"
    (run_dir / "csv").mkdir()
    (run_dir / "inside").symlink_to("run.json")
    (run_dir / "loop").symlink_to("loop")
    assert resumed(config)
    (run_dir / name).symlink_to("/etc")
    assert refusal(resumed, config).startswith(f"out/{name}: is a link that leads out of the run's folder")


def test_a_run_of_words_with_tabs_and_line_breaks_goes_on(run_dir: Path) -> None:
    words = ["tags=['a\tb', 'c\nd']"]
    config = resume.config_to_resume(
        {"status": "interrupted", "config": composed(*words), "overrides": words}, run_dir, []
    )
    assert config["tags"] == ["a\tb", "c\nd"]


CHOICES = ([], {"model": 5}, {"model": "\x1b]0;cnn\x07"}, {"\x1b[2J": "cnn"})
ODD = [*({"choices": value} for value in CHOICES), *({"overrides": value} for value in (["\x1b[2J"], "x", [5]))]


@pytest.mark.parametrize("fields", [*ODD, {"resumed": 5}, {"config": None}, {"config": {}}], ids=str)
def test_a_record_of_another_shape_is_refused(fields: dict, run_dir: Path) -> None:
    run_record = {"status": "interrupted", "config": composed(), **fields}
    assert refusal(resume.config_to_resume, run_record, run_dir, [])
