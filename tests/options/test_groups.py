"""The configs: the installed ones and those of `--config-dir`, and what they hold at which place."""

from pathlib import Path

import pytest

from batchscope.options.groups import choices_of, known_nodes, use_config_dir
from tests.support.command_lines import composed, refusal
from tests.support.own_package import NET, Write


def test_misspelled_choices_and_options_of_the_users_own_are_answered(package: Write) -> None:
    use_config_dir("conf")
    assert refusal(composed, "model=mynt").endswith("Did you mean 'mynet'?")
    assert "did you mean 'model=mynet'?" in refusal(composed, "mynet")
    assert "Did you mean 'flavour'?" in refusal(composed, "model=mynet", "+model.flavor=x")
    assert refusal(composed, "model=mynet", "model.flavour=5") == "model.flavour: got 5, takes a text."


def test_a_choice_of_a_folder_here_is_answered_with_its_config_dir(package: Write) -> None:
    use_config_dir(None)
    assert refusal(composed, "model=mynet").endswith("; conf/model/mynet.yaml has it: add --config-dir=conf")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("optimizer.groups.x.lr=1", "Index 'x' (str) is not an int"),
        ("optimizer.groups.5.lr=1", "Error merging override optimizer.groups.5.lr=1"),
        ("optimizer.groups.0.lr=1", "To append to your config use +optimizer.groups.0.lr=1"),
    ],
)
def test_an_item_of_a_list_is_named_by_its_number(option: str, said: str, package: Write) -> None:
    package({"experiment/own": "# @package _global_\noptimizer: {groups: [{match: ['*.bias']}]}"})
    use_config_dir("conf")
    assert refusal(composed, "experiment=own", option).endswith(said)


def test_a_command_line_is_checked_without_importing_what_it_names(package: Write) -> None:
    package(net="open('ran', 'w')\n" + NET)
    use_config_dir("conf")
    assert composed("model=mynet")
    assert not Path("ran").exists()


def test_a_model_that_does_not_fit_the_data_lists_the_users_own(package: Write) -> None:
    package({"model/broken": "{"}, net=NET.replace("    def", "    accepts = ('sequence',)\n    def"))
    use_config_dir("conf")
    assert refusal(composed, "model=cnn", "data=adding").endswith("lstm_cell, mynet, rnn_cell, stacked_lstm")


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
    use_config_dir("conf")
    assert [name for name, nodes in known_nodes().items() if any("mine" in node for node in nodes)] == [place]


def test_the_link_by_which_an_editor_locks_a_file_is_no_config(package: Write) -> None:
    Path("conf/model/.#mynet.yaml").symlink_to("me@here.1")
    use_config_dir("conf")
    assert "mynet" in choices_of("model") and ".#mynet" not in choices_of("model")
    assert any("flavour" in node for node in known_nodes()["model"])
