"""The configs: the installed ones and those of `--config-dir`, and what they hold at which place."""

from pathlib import Path

import pytest

from batchscope.options.groups import choices_of, known_nodes, use_config_dir
from tests.support.command_lines import composed, refusal
from tests.support.own_package import NET, Write

GROUPS = "optimizer.groups"
REFUSED = {
    "model=mynt": "Did you mean 'mynet'?",
    "mynet": "did you mean 'model=mynet'?",
    "model=mynet +model.flavor=x": "Did you mean 'flavour'? model takes flavour, size.",
    "model=mynet model.flavour=5": "model.flavour: got 5, takes a text.",
    "model=cnn data=adding": "lstm_cell, mynet, rnn_cell, stacked_lstm",
    f"experiment=own {GROUPS}.x.lr=1": "Index 'x' (str) is not an int",
    f"experiment=own {GROUPS}.5.lr=1": f"Error merging override {GROUPS}.5.lr=1",
    f"experiment=own {GROUPS}.0.lr=1": f"To append to your config use +{GROUPS}.0.lr=1",
}


def test_the_users_own_choices_and_options_are_answered_and_nothing_is_imported(package: Write) -> None:
    net = "open('ran', 'w')\n" + NET.replace("    def", "    accepts = ('sequence',)\n    def")
    own = "# @package _global_\noptimizer: {groups: [{match: ['*.bias']}]}"
    package({"experiment/own": own, "model/broken": "{"}, net=net)
    use_config_dir("conf")
    for line, said in REFUSED.items():
        assert said in refusal(composed, *line.split()), line
    assert composed("model=mynet", "data=adding")["model"]["flavour"] == "salty"
    assert not Path("ran").exists()


def test_a_choice_of_a_folder_here_is_answered_with_its_config_dir(package: Write) -> None:
    use_config_dir(None)
    assert refusal(composed, "model=mynet").endswith("; conf/model/mynet.yaml has it: add --config-dir=conf")


@pytest.mark.parametrize(
    ("file", "text", "place"),
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
def test_a_section_stands_where_its_file_says(file: str, text: str, place: str, package: Write) -> None:
    package({file: text, "_own": "mine: 1"})
    Path("conf/model/.#mynet.yaml").symlink_to("me@here.1")  # by which an editor locks a file
    use_config_dir("conf")
    assert [name for name, nodes in known_nodes().items() if any("mine" in node for node in nodes)] == [place]
    assert "mynet" in choices_of("model") and ".#mynet" not in choices_of("model")
