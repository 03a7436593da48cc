"""A file sets numbers and switches; what is built, where is written and what is downloaded the command line says."""

import copy
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import write_checkpoint
from batchscope.cli.evaluate import evaluate
from batchscope.errors import UserError
from batchscope.options import trust
from batchscope.options.check import check_config
from batchscope.options.command_lines import evaluate_command, resume_command
from batchscope.options.compose import apply_overrides, check_command_line
from batchscope.options.groups import use_config_dir
from batchscope.records.run_record import read
from batchscope.sweep import job
from tests.support.own_package import Write
from tests.support.runs import EVERY_4, SMALL, kill_9, record, run

STOP_EARLY = "lightning.pytorch.callbacks.EarlyStopping"


def config_of(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The configuration of a run that stands in a folder, as its command line gives it."""
    return check_command_line([f"run_dir={run_dir}", *overrides], multirun=False)[0]


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of a configuration with one option of another value; sections on the way are made."""
    made = copy.deepcopy(config)
    node = made
    *above, last = key.split(".")
    for part in above:
        node[part] = node.get(part) or {}
        node = node[part]
    node[last] = value
    return made


def resumed(config: dict[str, Any], run_dir: Path, *overrides: str) -> dict[str, Any]:
    return resume.configuration({"status": "interrupted", "config": config}, run_dir, list(overrides))


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    return Path("out")


# --- plain data ------------------------------------------------------------------------------------------------------


def cyclic() -> dict:
    node: dict = {}
    node["a"] = [node]
    return node


def deep() -> list:
    node: list = []
    for _ in range(100_000):
        node = [node]
    return node


def wide() -> list:
    node: list = ["x"] * 10
    for _ in range(10):
        node = [node] * 10
    return node


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *((config, "holds no configuration") for config in (None, [], "x", 5)),
        *((config, "too many values or levels") for config in (cyclic(), {"a": deep()}, {"a": wide()})),
        *(({"a": text}, "characters that no option has") for text in ("\0", "a\nb", "\x1b[2J", "\ud800")),
        *(
            ({"a": [{key: 1}]}, "the name of an option")
            for key in (5, None, True, "", "a.b", "a b", "\x1b[2J", "x" * 200)
        ),
        *(({"a": [value]}, "the value of an option") for value in (torch.zeros(1), b"x", {1}, Path("x"))),
        *(({"a": text}, "for the command line alone") for text in ("${oc.env:HOME}", "x${seed}", "${nowhere}")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_plain_configuration_is_refused(config: Any, said: str) -> None:
    assert said in refusal(trust.plain, config, "f")


def test_a_record_without_an_end_is_refused(run_dir: Path) -> None:
    (run_dir / "run.json").write_text('{"a":' * 100_000)
    assert refusal(read, run_dir).startswith("out/run.json: cannot be read")


# --- what is built ---------------------------------------------------------------------------------------------------

ENCODER = "_target_: mynet.net.Encoder\nact: {_target_: torch.nn.ReLU, _partial_: true}\nwidth: 4\n"
NESTED = {
    "model/mynet": "defaults: [encoder: small, _self_]\n_target_: mynet.net.Net\nflavour: salty\n",
    "model/encoder/small": ENCODER,
    "model/other": "_target_: mynet.net.Other\nflavour: sour\n",
    "model/layers": "_target_: torch.nn.Sequential\n_args_: [{_target_: torch.nn.Flatten}, {_target_: mynet.net.Head}]\n",
    "experiment/mine": "# @package _global_\ndefaults: [override /model: mynet]\n"
    "callbacks: {mine: {_target_: mynet.net.Mine}}\nmodel: {flavour: spicy}\n",
}


@pytest.fixture
def own(package: Write) -> Callable[..., dict[str, Any]]:
    """The configuration of a run of the user's own model, as its command line gives it."""
    package(NESTED, net="class Net:\n    def __init__(self, **options): pass")
    use_config_dir("conf")
    return lambda *words: config_of(Path("out"), *words)


@pytest.mark.parametrize("words", [["model=mynet"], ["model=other"], ["model=layers"], ["experiment=mine"]], ids=str)
def test_a_file_may_repeat_what_the_configs_hold_at_the_place(words: list[str], own: Callable[..., Any]) -> None:
    config = own(*words, "trainer.max_epochs=7")
    assert resumed(config, Path("out")) == {**config, "resume": "out"}


# a change to the record of `model=mynet` or `model=layers`, and the option that is refused
PLANTED = [
    ("model._target_", "mynet.net.Missing", None),
    ("model._target_", "mynet.net.Encoder", None),  # of another place
    ("model._target_", "mynet.net.Other", "model.flavour"),  # whose configs have another text
    ("model.flavour", "odd", None),
    ("model.encoder._target_", "mynet.net.Net", None),
    ("model.encoder._target_", "os.system", None),
    ("model.encoder.act._partial_", False, None),
    ("model.encoder._convert_", "object", None),
    ("model.encoder.width", {"_target_": "mynet.net.Encoder"}, "model.encoder.width._target_"),
    ("model.head", [{"_target_": "mynet.net.Head"}], None),
    ("model._args_", [], None),
    ("model._args_", [1], None),
    ("model._args_", [{"_target_": "torch.nn.Flatten"}, {"_target_": "mynet.net.Head"}], None),  # of model=layers
    ("data._target_", "mynet.net.Net", None),
    ("callbacks.mine", {"_target_": "mynet.net.Net"}, "callbacks.mine._target_"),
    ("callbacks.other", {"_target_": "mynet.net.Mine"}, "callbacks.other._target_"),
    ("trainer.strategy", {"_target_": "mynet.net.Net"}, "trainer.strategy._target_"),
]


@pytest.mark.parametrize(("key", "value", "refused"), PLANTED)
def test_a_file_alone_builds_nothing_else(key: str, value: Any, refused: str | None, own: Callable[..., Any]) -> None:
    message = refusal(resumed, changed(own("model=mynet"), key, value), Path("out"))
    assert message.startswith(f"{refused or key}: is ")
    assert "in out/run.json, which a file alone cannot decide; if you want it, " in message


def test_a_list_of_nodes_is_repeated_as_a_whole(own: Callable[..., Any]) -> None:
    config = own("model=layers")
    config["model"]["_args_"][1]["width"] = 5
    assert refusal(resumed, config, Path("out")).startswith("model._args_: is [")


def test_without_the_configs_every_target_is_typed(own: Callable[..., Any]) -> None:
    config = own("model=other")
    use_config_dir(None)
    Path("conf").rename("out/conf")  # a folder beside the record is not looked at
    assert refusal(resumed, config, Path("out")) == (
        "model._target_: is 'mynet.net.Other' in out/run.json, which a file alone cannot decide; if you want it, add the "
        "--config-dir that has its YAML, or write model._target_=mynet.net.Other"
    )
    words = resume_command(config, Path("out"), ["train"])
    assert words == "train resume=out model._target_=mynet.net.Other model.flavour=sour"
    assert resumed(config, Path("out"), *words.split()[2:])["model"] == config["model"]
    use_config_dir("out/conf")
    assert resume_command(config, Path("out"), ["train"]) == "train resume=out --config-dir=out/conf"
    assert evaluate_command(config, "a.ckpt").endswith(" ckpt=a.ckpt --config-dir=out/conf")


# --- what has to be said again ---------------------------------------------------------------------------------------

# option → a value that the command line may give it, and a file alone may not
OUTSIDE = {
    "callbacks.checkpoint.dirpath": "/elsewhere",
    "callbacks.curves._target_": "lightning.pytorch.callbacks.ModelCheckpoint",
    "logger.csv.save_dir": "elsewhere",
    "logger.csv.name": "../elsewhere",
    "logger.tensorboard.version": "/elsewhere",
    "logger.tensorboard.sub_dir": "/elsewhere",
    "logger.tensorboard.filename_suffix": "out/x",
    "logger.tensorboard._target_": "lightning.pytorch.loggers.MLFlowLogger",
    "trainer.default_root_dir": "/elsewhere",
    "trainer.model_registry": "somebody/model",
    "data.root": "/elsewhere",
    "model.weights": "DEFAULT",
}


PLACES = ("callbacks.checkpoint.dirpath", "logger.csv.save_dir", "trainer.default_root_dir", "data.root")


@pytest.mark.parametrize("key", OUTSIDE)
def test_what_leads_out_of_the_run_has_to_be_said_again(key: str, run_dir: Path) -> None:
    base = config_of(run_dir, "model=torchvision")
    if key.endswith("_target_"):
        base = changed(base, key.removesuffix("._target_"), {"monitor": "val/loss"} if "callbacks" in key else {})
    config = changed(base, key, OUTSIDE[key])
    message, word = refusal(resumed, config, run_dir), f"{key}={OUTSIDE[key]}"
    if key in PLACES:
        said = f"; repeat {word}: places are not taken from records"
    elif key.endswith("_target_"):
        said = f", which a file alone cannot decide; if you want it, add the --config-dir that has its YAML, or write {word}"
    else:
        said = f", which a file alone cannot decide; if you want it, write {word}"
    assert message == f"{key}: is {OUTSIDE[key]!r} in out/run.json{said}"
    assert resumed(config, run_dir, word) == {**config, "resume": "out"}


def test_a_typed_option_confirms_itself_alone(run_dir: Path) -> None:
    config = changed(config_of(run_dir), "data.root", "/a")
    config = changed(config, "callbacks.checkpoint.dirpath", "/b")
    assert refusal(resumed, config, run_dir, "data.root=/a").startswith("callbacks.checkpoint.dirpath: is '/b'")
    assert refusal(resumed, config, run_dir, "callbacks.checkpoint.dirpath=/b").startswith("data.root: is '/a'")


@pytest.fixture
def elsewhere(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run whose checkpoints lie outside its folder."""
    return changed(config_of(run_dir), "callbacks.checkpoint.dirpath", "/elsewhere")


@pytest.mark.parametrize(
    "word",
    [
        "callbacks.checkpoint={every_n_steps: 1}",
        "+callbacks.checkpoint={every_n_steps: 1}",
        "++callbacks.checkpoint={every_n_steps: 1}",
        "callbacks.checkpoint={}",
        "callbacks.checkpoint={every_n_steps: 1, monitor: val/loss}",
        "~callbacks.checkpoint.every_minutes",
        "callbacks.curves=null",
        "data=mnist",
    ],
)
def test_an_option_in_braces_confirms_what_it_spells_out_alone(word: str, elsewhere: dict, run_dir: Path) -> None:
    assert refusal(resumed, elsewhere, run_dir, word).startswith("callbacks.checkpoint.dirpath: is '/elsewhere'")


@pytest.mark.parametrize(
    "word",
    [
        "callbacks.checkpoint={dirpath: /elsewhere, every_n_steps: 1}",
        "++callbacks.checkpoint={dirpath: /elsewhere}",
        "callbacks.checkpoint=null",
        "~callbacks.checkpoint",
        "callbacks=default",
        "callbacks=null",
    ],
)
def test_a_value_that_is_spelled_out_and_a_node_that_is_replaced_are_confirmed(
    word: str, elsewhere: dict, run_dir: Path
) -> None:
    trust.confirm(check_config(apply_overrides(elsewhere, [word])), [word], "f", run_dir)


def test_a_list_is_confirmed_as_a_whole(run_dir: Path) -> None:
    config = changed(config_of(run_dir), "trainer.plugins", ["it's", "a, b", None, True, 1.5])
    words = refusal(resumed, config, run_dir).rpartition("write ")[2]
    (word,) = shlex.split(words)
    assert check_config(apply_overrides(config, [word])) == config
    trust.confirm(config, [word], "f", run_dir)
    assert refusal(trust.confirm, config, ["trainer.max_epochs=1"], "f", run_dir)


def test_a_typed_value_takes_the_place_of_the_files(run_dir: Path) -> None:
    config = changed(config_of(run_dir), "data.root", "/a")
    assert resumed(config, run_dir, "data.root=/c")["data"]["root"] == "/c"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=torchvision", "model.name=vgg11", "trainer.precision=bf16-mixed", "trainer=fsdp"],
        ["data=sequential_mnist", "model=lstm_cell", "data.steps=pixels", "optimizer=sgd", "test=false"],
        ["logger.csv.name=mine", "+logger.csv.prefix=a", "callbacks.checkpoint.monitor=val/acc"],
        ["+trainer.val_check_interval='00:00:10:00'", "+trainer.check_val_every_n_epoch=null"],
        ["+trainer.max_time={hours:1}", "+trainer.check_val_every_n_epoch=2", "+trainer.profiler=simple"],
        ["experiment=find_batch_size", "hydra.sweep.dir=x"],
        ["experiment=diagnose", "search.batch_factors=[8]"],
    ],
    ids=" ".join,
)
def test_an_ordinary_run_is_resumed_without_another_word(overrides: list[str], run_dir: Path) -> None:
    config = config_of(run_dir, *overrides)
    assert resumed(config, run_dir) == {**config, "resume": "out"}


def test_a_moved_run_keeps_its_places(run_dir: Path) -> None:
    config = config_of(Path("before/it/moved"))
    assert resumed(config, run_dir)["callbacks"]["checkpoint"]["dirpath"] == "out/checkpoints"


@pytest.mark.parametrize("recorded", ["", "/", ".", "..", None, 5])
def test_the_folder_that_a_record_names_is_not_the_runs(recorded: Any, run_dir: Path) -> None:
    config = changed(config_of(run_dir), "run_dir", recorded)
    assert resumed(config, run_dir)["run_dir"] == "out"
    assert "is '/etc" in refusal(resumed, changed(config, "data.root", "/etc"), run_dir) or recorded == "/"


PATHS = [
    *("out/../elsewhere", "outside", "out/./../../x", "~/x", "s3://out/x", "out/a/..", "out/~/x", "out/$HOME"),
    *("~/../{here}/out/x", "$PWD/../{here}/out", "file://../{here}/out/x", "ftp://127.0.0.1:1/../../out/x"),
    *("x::file:/../../out", "out/file://x"),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_only_looks_as_if_it_lay_in_the_folder_is_outside(path: str, run_dir: Path) -> None:
    for key in PLACES[:3]:
        config = changed(config_of(run_dir), key, path.format(here=Path.cwd().name))
        assert f"{key}: is " in refusal(resumed, config, run_dir)


@pytest.mark.parametrize("sub_dir", ["deep", "a.b", "deep/../../x", "deep/x", "..", "~", "$PWD"])
def test_a_name_below_a_loggers_folder_is_no_path(sub_dir: str, run_dir: Path) -> None:
    (run_dir / "a" / "b").mkdir(parents=True)
    (run_dir / "deep").symlink_to("a/b")
    config = changed(config_of(run_dir), "logger.tensorboard.sub_dir", sub_dir)
    if sub_dir in ("deep", "a.b"):
        assert resumed(config, run_dir)
    else:
        assert refusal(resumed, config, run_dir).startswith("logger.tensorboard.sub_dir: is ")


@pytest.mark.parametrize("run", ["../there/out", "./out", "out"])
def test_a_folder_that_the_command_line_reaches_through_others_is_the_runs(run: str, run_dir: Path) -> None:
    there = Path("there").absolute()
    (there / "out").mkdir(parents=True)
    os.chdir(there)
    config = config_of(Path(run))
    assert resumed(config, Path(run))["callbacks"]["checkpoint"]["dirpath"].endswith("out/checkpoints")


@pytest.mark.parametrize("place", ["elsewhere", "out/../elsewhere", "out/link", "file://../out", "out/a::x", "/"])
def test_what_an_object_would_write_out_of_the_run_is_refused(place: str, run_dir: Path) -> None:
    (run_dir / "link").symlink_to("..")
    config = config_of(run_dir)
    trust.refuse_outside(config, run_dir, [("logger.csv", "out/csv"), ("logger.csv", run_dir.absolute() / "x")])
    message = refusal(trust.refuse_outside, config, run_dir, [("logger.csv", place)])
    assert message == f"logger.csv: would write to {place!r}, which is not in the run's folder out"
    said = config_of(run_dir, "logger.csv.save_dir=/elsewhere")
    trust.refuse_outside(said, run_dir, [("logger.csv", place)])


@pytest.mark.parametrize("name", [".lock", "run.tmp", "checkpoints", "csv/metrics.csv"])
def test_a_link_out_of_the_folder_is_refused(name: str, run_dir: Path) -> None:
    config = config_of(run_dir)
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / "inside").symlink_to("run.json")
    (run_dir / "loop").symlink_to("loop")
    assert resumed(config, run_dir)
    (run_dir / name).symlink_to("/etc")
    assert refusal(resumed, config, run_dir).startswith(f"out/{name}: is a link that leads out of the run's folder")


@pytest.mark.parametrize("value", ["/a b", "it's", "x,y", "a=b", "[1]", "", "\\", "{a}", "é", "null"])
def test_the_words_of_a_refusal_are_what_hydra_reads(value: str, run_dir: Path) -> None:
    (word,) = shlex.split(trust.as_words("data.root", value))
    assert resumed(config_of(run_dir), run_dir, word)["data"]["root"] == value


@pytest.mark.parametrize(
    "facts",
    [
        {"choices": []},
        {"choices": {"model": 5}},
        {"choices": {"model": "\x1b]0;cnn\x07"}},
        {"choices": {"\x1b[2J": "cnn"}},
        {"overrides": ["\x1b[2J"]},
        {"overrides": "x"},
        {"overrides": [5]},
        {"resumed": 5},
        {"config": None},
        {"config": {}},
    ],
    ids=str,
)
def test_a_record_of_another_shape_is_refused(facts: dict, run_dir: Path) -> None:
    whole = {"status": "interrupted", "config": config_of(run_dir), **facts}
    assert refusal(resume.configuration, whole, run_dir, [])


# --- a run of a sweep ------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configurations that a sweep's job would have trained."""
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr("batchscope.training.run.train", lambda config, *_: configs.append(config))
    return configs


@pytest.mark.parametrize("status", ["planned", "interrupted"])
def test_a_job_trains_what_its_sweep_has_checked(status: str, run_dir: Path, trained: list[dict[str, Any]]) -> None:
    config = config_of(run_dir, "data.root=/elsewhere", f"+callbacks.stop={{_target_:{STOP_EARLY},monitor:val/loss}}")
    (run_dir / "run.json").write_text(json.dumps({"status": status, "config": config, "choices": {}, "overrides": []}))
    job.run_planned(run_dir, trust.digest(config))
    assert [trust.digest(one) for one in trained] == [trust.digest(config)]
    assert trained[0]["resume"] == (None if status == "planned" else "out")


@pytest.mark.parametrize("status", ["planned", "interrupted"])
@pytest.mark.parametrize("known", [None, "0" * 32], ids=["alone", "of another sweep"])
def test_a_job_does_not_trust_another_record(
    known: str | None, status: str, run_dir: Path, trained: list[dict[str, Any]]
) -> None:
    config = config_of(run_dir, "data.root=/elsewhere")
    (run_dir / "run.json").write_text(json.dumps({"status": status, "config": config}))
    assert refusal(job.run_planned, run_dir, known).startswith("data.root: is '/elsewhere' in out/run.json")
    hostile = changed(config_of(run_dir), "model._args_", [{"_target_": "torch.hub.load"}])
    (run_dir / "run.json").write_text(json.dumps({"status": status, "config": hostile}))
    assert refusal(job.run_planned, run_dir, known).startswith("model._args_: is [")
    assert trained == []


# --- a checkpoint ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saved",
    [
        None,
        [],
        {},
        {"config": {}},
        {"config": {}, "name": 5},
        {"config": {}, "name": "\x1b[2J"},
        {"config": {"model": "x"}, "name": "a"},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_shape_is_refused(saved: Any, tmp_path: Path) -> None:
    write_checkpoint({"state_dict": {}, "batchscope": saved}, tmp_path / "a.ckpt")
    refusal(evaluate, tmp_path / "a.ckpt", [])


@pytest.mark.parametrize("key", ["data.root", "model.weights", "trainer.model_registry"])
def test_a_checkpoint_has_to_be_confirmed_as_a_record(key: str, run_dir: Path) -> None:
    config = changed(config_of(run_dir, "model=torchvision"), key, OUTSIDE[key])
    write_checkpoint({"state_dict": {}, "batchscope": {"config": config, "name": "a"}}, Path("a.ckpt"))
    message = refusal(evaluate, Path("a.ckpt"), [])
    assert message.startswith(f"{key}: is {OUTSIDE[key]!r} in a.ckpt")


@pytest.mark.parametrize("weights", [None, [], 5, {"a": "b"}, {5: 5}], ids=str)
def test_what_is_no_weights_is_refused(weights: Any, run_dir: Path) -> None:
    config = config_of(run_dir, "data=adding", "model=rnn_cell", "data.num_train=4", "data.num_val=4")
    write_checkpoint({"state_dict": weights, "batchscope": {"config": config, "name": "a"}}, Path("a.ckpt"))
    assert refusal(evaluate, Path("a.ckpt"), []) == "ckpt: a.ckpt is not a checkpoint that batchscope wrote"


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was killed in its second epoch."""
    folder = tmp_path_factory.mktemp("killed")
    step = ("batchscope.training.task.Task.training_step", 18, kill_9)
    assert run(folder, *SMALL, EVERY_4, "hydra.run.dir=out", faults=[step]).end() == -9
    return folder


def payload(folder: Path) -> dict[str, Any]:
    """A node by which torch runs a file of somebody's."""
    (folder / "repo").mkdir(exist_ok=True)
    (folder / "repo" / "hubconf.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\ndef f(): pass\n")
    return {"_target_": "torch.hub.load", "repo_or_dir": str(folder / "repo"), "model": "f", "source": "local"}


@pytest.mark.parametrize(
    "key",
    ["model._args_", "data._args_", "callbacks.curves._args_", "logger.csv._args_", "trainer.plugins", "search.a"],
)
def test_nothing_in_a_record_runs(key: str, killed: Path, tmp_path: Path) -> None:
    here = Path(shutil.copytree(killed, tmp_path / "here"))
    hostile = changed(record(here / "out"), f"config.{key}", [payload(tmp_path)])
    (here / "out" / "run.json").write_text(json.dumps(hostile))
    before = {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()}
    done = run(here, "resume=out")
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith(f"error: {key}")
    assert not (tmp_path / "ran").exists()
    assert {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()} == before


def test_what_a_library_makes_of_a_folders_name_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "hydra.run.dir=a$WHERE", environ={"WHERE": "/../b"})
    assert done.end() == 1
    assert done.complained.startswith("error: logger.tensorboard: would write to 'a/../b/")
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


@pytest.mark.slow
def test_a_run_writes_in_its_own_folder_alone(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "hydra.run.dir=out", "callbacks.checkpoint.dirpath=null", "+trainer.profiler=pytorch")
    assert done.end() == 0, done.complained
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stdout", "stderr"}
    assert (tmp_path / "out" / "checkpoints" / "last.ckpt").exists()


def test_a_job_of_hydras_is_not_unpickled(tmp_path: Path) -> None:
    done = run(tmp_path, "--experimental-rerun", "config.pickle")
    assert done.end() == 1
    assert done.complained.startswith("error: --experimental-rerun: a pickle can run code, and is not loaded")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_says_all_that_resuming_it_takes(tmp_path: Path) -> None:
    step = ("batchscope.training.task.Task.training_step", 3, interrupt)
    keep = f"logger.csv.save_dir={tmp_path / 'curves'}"
    done = run(tmp_path, *SMALL, "hydra.run.dir=out", keep, faults=[step])
    assert done.end() == 130
    assert f"resume   python train.py resume=out {keep}\n" in done.said
