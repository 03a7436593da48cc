"""Packages of the user's own: who may say that their classes are built, and what no word makes buildable."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchscope.checkpointing import resume
from batchscope.checkpointing.checkpoint_file import write_checkpoint
from batchscope.cli.evaluate import evaluate
from batchscope.errors import UserError
from batchscope.options import compositions, packages, signatures, trust
from batchscope.options.check import check_config
from batchscope.options.command_lines import evaluate_command, resume_command
from batchscope.options.compose import apply_overrides, check_command_line
from batchscope.options.groups import choices_of, use_config_dir
from batchscope.sweep import job
from batchscope.training.build import build

NET = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, spec, flavour: str = 'plain'): super().__init__()\n"
MARK = "import pathlib\npathlib.Path('ran').write_text('')\n"  # what a module does that is imported


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that writes the modules of a package `mynet` into the current folder, which has a `conf` for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(packages, "_typed", ())
    monkeypatch.setattr(signatures, "_problems", {})
    caches = (signatures.signature_of, signatures.class_attribute, signatures._load, compositions._pickled)
    caches += (packages._installed,)

    def write(package: str = "mynet", **modules: str) -> None:
        Path(package).mkdir(exist_ok=True)
        for name, text in {"__init__": "", "net": NET, **modules}.items():
            Path(package, f"{name}.py").write_text(text)
        for cache in caches:
            cache.cache_clear()

    write()
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mynet.yaml").write_text("_target_: mynet.net.Net\nflavour: salty\n")
    Path("out").mkdir()
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mynet", "other")]:
        del sys.modules[name]
    for cache in caches:
        cache.cache_clear()


def config_of(*words: str) -> dict[str, Any]:
    return check_command_line(["run_dir=out", *words], multirun=False)[0]


def own(*words: str) -> dict[str, Any]:
    """The configuration of a run of the user's own model."""
    use_config_dir("conf")
    return config_of("model=mynet", "trust=mynet", *words)


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def resumed(config: dict[str, Any], *words: str) -> dict[str, Any]:
    return resume.configuration({"status": "interrupted", "config": config}, Path("out"), list(words))


# --- the user's word -------------------------------------------------------------------------------------------------


def test_a_package_that_nobody_trusts_is_refused_with_the_word_that_trusts_it(project: Callable[..., None]) -> None:
    message = refusal(config_of, "model={_target_: mynet.net.Net}")
    assert message == (
        "model._target_: got 'mynet.net.Net', takes a Module class of batchscope; if mynet is a package of your own, "
        "write trust=mynet"
    )


@pytest.mark.parametrize("word", ["trust=mynet", "trust=[mynet]", "++trust=[mynet]", "trust=[mynet,other]"])
def test_a_word_on_the_command_line_trusts_a_package_of_the_current_folder(
    word: str, project: Callable[..., None]
) -> None:
    project("other")
    use_config_dir("conf")
    assert config_of("model=mynet", word)["model"]["_target_"] == "mynet.net.Net"


def test_a_yaml_that_the_command_line_names_trusts_a_package(project: Callable[..., None]) -> None:
    Path("conf/experiment").mkdir()
    Path("conf/experiment/mine.yaml").write_text(
        "# @package _global_\ntrust: [mynet]\ndefaults: [override /model: mynet]\n"
    )
    use_config_dir("conf")
    assert config_of("experiment=mine")["trust"] == ["mynet"]


def test_an_installed_package_says_it_by_an_entry_point(project: Callable[..., None], tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "mynet-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mynet\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[batchscope]\nmynet = mynet\nodd = torch\n")
    Path("mynet").rename(site / "mynet")
    sys.path.append(str(site))
    use_config_dir("conf")
    assert config_of("model=mynet")["trust"] is None
    assert not packages.trusts("torch.nn.Linear")


def test_what_lies_in_the_current_folder_is_not_installed(project: Callable[..., None]) -> None:
    Path("mynet.egg-info").mkdir()
    Path("mynet.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: mynet\nVersion: 1.0\n")
    Path("mynet.egg-info/entry_points.txt").write_text("[batchscope]\nmynet = mynet\n")
    for here in ("", str(Path.cwd())):
        sys.path.insert(0, here)
        packages._installed.cache_clear()
        assert not packages.trusts("mynet.net.Net")


def test_the_current_folder_shadows_nothing(project: Callable[..., None]) -> None:
    project("json")
    own()
    assert sys.path[-1] == str(Path.cwd())
    assert "conf" not in json.__file__


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trust=mynet.net", "trust: got 'mynet.net', takes names of packages, without dots"),
        ("trust=_mynet", "trust: got '_mynet', takes names of packages"),
        ("trust=''", "trust: got '', takes names of packages"),
        ("trust=../mynet", "trust: got '../mynet', takes names of packages"),
        ("trust=5", "trust: got 5, takes a text or a list, each item a text or null"),
        ("trust=[5]", "trust: got [5], takes a text or a list, each item a text or null"),
        ("trust=os", "trust: got 'os', takes packages of your own: os is a library that needs no trust"),
        ("trust=torch", "trust: got 'torch', takes packages of your own"),
        ("trust=batchscope", "trust: got 'batchscope', takes packages of your own"),
        ("trust=mynt", "trust: mynt is not installed, and no folder of this name with an __init__.py is here. Did you mean 'mynet'?"),
        ("trust=conf", "trust: conf is not installed, and no folder of this name with an __init__.py is here."),
        ("trust=typing_extensions", "trust: typing_extensions is no package"),
        ("trust=mynet,other", "trust: got several values"),
    ],
)  # fmt: skip
def test_a_word_that_names_no_package_of_ones_own_is_refused(
    word: str, said: str, project: Callable[..., None]
) -> None:
    assert refusal(config_of, word).startswith(said)


def test_trust_is_not_swept_over(project: Callable[..., None]) -> None:
    project("other")
    message = refusal(check_command_line, ["trust=mynet,other"], True)
    assert message == "trust: is not swept over; to trust several packages write trust=[one,other]"


# --- what a trusted package may build --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "mynet.net.subprocess.Popen",  # a module that it imports
        "mynet.net.Popen",  # a class that it imports
        "mynet.net.Linear",  # of the right kind, but defined elsewhere
        "mynet.net.make",  # a function
        "mynet.net.Other",  # a class of another kind
        "mynet.net._Hidden",
        "mynet.net.Missing",
        "mynet.missing.Net",
        "mynet.net.Net.forward",
        "mynet",
        "mynet.",
        "mynet..net.Net",
        "mynets.net.Net",
        "other.net.Net",  # a package that is there, but not trusted
        "mynet.again.Net",  # another package's class under its name
        "mynet.circle.Net",
    ],
)
def test_a_target_that_is_no_model_of_the_trusted_package_is_refused(target: str, project: Callable[..., None]) -> None:
    project("other", net=MARK + NET)
    more = "import subprocess\nfrom subprocess import Popen\nfrom torch.nn import Linear\ndef make(spec): return Net(spec)\n"
    more += "class Other: pass\nclass _Hidden(Net): pass\n"
    circle = "from .circle2 import Net\n"
    project(net=NET + more, again="from other.net import Net", circle=circle, circle2="from .circle import Net\n")
    assert refusal(config_of, f"model={{_target_: {target}}}", "trust=mynet").startswith("model._target_: got ")
    assert not Path("ran").exists()


def test_nothing_is_imported_before_the_command_line_is_checked(project: Callable[..., None]) -> None:
    project(net=MARK + NET)
    assert "flavour: no such" not in refusal(own, "model.flavour=5")
    assert not Path("ran").exists()


def test_options_are_checked_against_a_signature_and_those_of_its_bases(project: Callable[..., None]) -> None:
    project(
        base=NET,
        net="from . import base\nclass Net(base.Net):\n    def __init__(self, size: PositiveInt = 1, **kwargs): pass\n",
    )
    assert refusal(own, "+model.size=0") == "model.size: got 0, takes a whole number of at least 1."
    assert refusal(own, "model.flavour=5") == "model.flavour: got 5, takes a text."
    assert "Did you mean 'flavour'?" in refusal(own, "+model.flavor=x")


@pytest.mark.parametrize(
    "annotation", ["().__class__", "str.mro", "int.__subclasses__()", "[x for x in str]", "str.join", "(lambda: 1)()"]
)
def test_an_annotation_reaches_no_more_than_its_names(annotation: str, project: Callable[..., None]) -> None:
    project(net=NET.replace("flavour: str", f"flavour: {annotation}"))
    assert own()
    assert signatures.signature_of("mynet.net.Net").parameters["flavour"] in (None, str.join, str.mro)


def test_a_syntax_error_is_one_line_with_its_place(project: Callable[..., None]) -> None:
    project(net=NET + "def broken(:\n")
    message = refusal(own)
    assert message.startswith("model._target_: mynet.net.Net cannot be read: mynet/net.py, line 4: ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import nowhere_at_all\n", "ModuleNotFoundError: No module named 'nowhere_at_all' (mynet/net.py, line 1)"),
        ("1 / 0\n", "ZeroDivisionError: division by zero (mynet/net.py, line 1)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 (mynet/net.py, line 1)"),
    ],
)
def test_a_package_that_cannot_be_imported_is_one_line_with_its_place(
    text: str, error: str, project: Callable[..., None]
) -> None:
    project(net=text + NET)
    node = own()["model"]
    assert refusal(build, node, "model") == f"model._target_: mynet.net.Net cannot be imported: {error}"


def test_a_class_is_checked_again_when_it_is_built(project: Callable[..., None]) -> None:
    project(net=NET + "from torch.nn import Identity as Net\n")  # the source text has shown another one first
    assert refusal(build, own()["model"], "model").startswith("model._target_: got 'mynet.net.Net', takes a torch.nn")


# --- a file's word ---------------------------------------------------------------------------------------------------


def test_a_record_trusts_nothing(project: Callable[..., None]) -> None:
    config = own()
    use_config_dir(None)
    assert "write trust=mynet" in refusal(resumed, config)
    assert refusal(resumed, config, "trust=mynet") == (
        "model._target_: is 'mynet.net.Net' in out/run.json, which a file alone cannot decide; if you want it, add the "
        "--config-dir that has its YAML, or write model._target_=mynet.net.Net"
    )
    assert refusal(resumed, config, "trust=mynet", "model._target_=mynet.net.Net").startswith(
        "model.flavour: is 'salty'"
    )
    assert resumed(config, "trust=mynet", "model._target_=mynet.net.Net", "model.flavour=salty")["trust"] == "mynet"


def test_a_record_alone_builds_nothing_of_an_installed_package(
    project: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_installed", lambda: frozenset({"mynet"}))
    sys.path.append(str(Path.cwd()))
    hostile = {**config_of(), "model": {"_target_": "mynet.net.Net", "flavour": "odd"}}
    assert refusal(resumed, hostile).startswith(
        "model._target_: is 'mynet.net.Net' in out/run.json, which a file alone"
    )
    use_config_dir("conf")
    assert refusal(resumed, hostile).startswith("model.flavour: is 'odd' in out/run.json, which a file alone cannot")
    hostile["model"]["flavour"] = "salty"  # as the user's YAML has it
    assert resumed(hostile)["model"]["flavour"] == "salty"


def test_the_configs_of_the_user_confirm_what_they_say(project: Callable[..., None]) -> None:
    config = own()
    assert resumed(config, "trust=mynet")["model"]["flavour"] == "salty"
    odd = {**config, "model": {**config["model"], "flavour": "odd"}}
    assert refusal(resumed, odd, "trust=mynet").startswith(
        "model.flavour: is 'odd' in out/run.json, which a file alone"
    )
    chosen = check_config(apply_overrides(resumed(config, "trust=mynet"), ["model=mynet"]))
    assert chosen["model"] == config["model"]


@pytest.mark.parametrize("said", ["mynet", ["mynet"], [[["mynet"]]], {"a": "mynet"}, "${oc.env:HOME}"])
def test_a_recorded_trust_is_ignored(said: Any, project: Callable[..., None]) -> None:
    config = {**config_of(), "trust": said}
    if said != "${oc.env:HOME}":
        assert resumed(config)["trust"] is None
    hostile = {**config, "model": {"_target_": "mynet.net.Net"}}
    refusal(resumed, hostile)
    write_checkpoint({"state_dict": {}, "batchscope": {"config": hostile, "name": "a"}}, Path("a.ckpt"))
    refusal(evaluate, Path("a.ckpt"), [])


def test_a_folder_of_configs_beside_a_record_is_not_read(project: Callable[..., None]) -> None:
    config = own()
    use_config_dir(None)
    Path("conf").rename("out/conf")
    assert "which a file alone cannot decide" in refusal(resumed, config, "trust=mynet")
    assert "mynet" not in choices_of("model")


def test_the_printed_commands_hold_the_words(project: Callable[..., None]) -> None:
    config = own()
    assert resume_command(config, Path("out"), ["train"]) == "train resume=out --config-dir=conf trust=mynet"
    assert evaluate_command(config, "a.ckpt").endswith(" ckpt=a.ckpt --config-dir=conf trust=mynet")
    use_config_dir(None)
    words = "model._target_=mynet.net.Net model.flavour=salty trust=mynet"
    assert resume_command(config, Path("out"), ["train"]) == f"train resume=out {words}"
    assert resumed(config, *words.split())["model"] == config["model"]


def test_a_job_trusts_what_its_sweep_has_checked(project: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[dict[str, Any]] = []
    monkeypatch.setattr("batchscope.training.run.train", lambda config, *_: trained.append(config))
    config = own()
    Path("out/run.json").write_text(json.dumps({"status": "planned", "config": config, "choices": {}, "overrides": []}))
    packages.trust(None)
    for known in (None, "0" * 32):
        assert "write trust=mynet" in refusal(job.run_planned, Path("out"), known)
    job.run_planned(Path("out"), trust.digest(config))
    assert [one["trust"] for one in trained] == ["mynet"]


# --- the folder of configs -------------------------------------------------------------------------------------------


def test_misspelled_choices_of_the_users_own_are_answered(project: Callable[..., None]) -> None:
    use_config_dir("conf")
    assert refusal(config_of, "model=mynt").endswith("Did you mean 'mynet'?")
    assert "did you mean 'model=mynet'?" in refusal(config_of, "mynet")


def test_a_model_that_does_not_fit_lists_the_users_own(project: Callable[..., None]) -> None:
    project(net=NET.replace("    def", "    accepts = ('sequence',)\n    def"))
    Path("conf/model/broken.yaml").write_text("{")
    use_config_dir("conf")
    assert refusal(config_of, "model=cnn", "data=adding", "trust=mynet").endswith(
        "lstm_cell, mynet, rnn_cell, stacked_lstm"
    )


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("nowhere", "--config-dir: got 'nowhere', which is not a folder"),
        ("conf/model/mynet.yaml", "--config-dir: got 'conf/model/mynet.yaml', which is not a folder"),
        ("conf/model", "--config-dir: 'conf/model' holds no YAML file of a config group, such as conf/model/model/….yaml"),
        ("clash", "--config-dir: clash/model/cnn.yaml has the name of an installed config; rename it"),
    ],
)  # fmt: skip
def test_a_folder_of_configs_that_cannot_be_meant_is_refused(
    folder: str, said: str, project: Callable[..., None]
) -> None:
    Path("clash/model").mkdir(parents=True)
    Path("clash/model/cnn.yaml").write_text("_target_: mynet.net.Net\n")
    assert refusal(use_config_dir, folder) == said
