"""A word typed by habit is answered in one line with what to write here, and what it says is right."""

import re
import shlex
from pathlib import Path

import pytest

from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.options.groups import CONFIGS, GROUPS, choices_of
from batchscope.options.habits import HABITS, habit
from batchscope.options.signatures import is_installed
from tests.support.runs import run


def answer(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        check_command_line(list(words), multirun=False)
    return str(caught.value)


@pytest.mark.parametrize("word", [word for word in HABITS if word != "run_dir"])
def test_every_word_is_answered(word: str) -> None:
    option, _, value = word.partition("=")
    said = answer(f"{option}={value or '7'}")
    assert said == f"{option}: {HABITS[word].replace('*', value or '7')}"


def test_a_word_stands_for_everything_below_it() -> None:
    assert answer("model.optimizer.lr=0.1").startswith("model.optimizer.lr: write optimizer=adam")
    assert answer("extras.print_config=true").startswith("extras.print_config: ")
    assert habit("model.hidden_size", "3") is None


@pytest.mark.parametrize("word", ["+ckpt_path=x", "+trainer.gpus=2", "+extras.print_config=true"])
def test_a_plus_changes_nothing(word: str) -> None:
    assert "no such option" not in answer(word)


def test_the_value_is_in_the_answer() -> None:
    assert answer("paths.data_dir=/data") == "paths.data_dir: write data.root=/data"


@pytest.mark.parametrize("word", [word for word in HABITS if "=" in word])
def test_no_answer_stands_in_the_way_of_a_choice_that_exists(word: str) -> None:
    group, _, choice = word.partition("=")
    assert group in GROUPS
    assert choice not in choices_of(group)


def test_the_folder_of_a_run_is_refused_where_it_was_ignored(tmp_path: Path) -> None:
    done = run(tmp_path, "run_dir=mine")
    assert done.end() == 1
    assert done.complained == "error: run_dir: is set by the run; write hydra.run.dir=mine to choose its folder\n"
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


def commands() -> list[list[str]]:
    """The options that the answers tell to write."""
    found = []
    for text in HABITS.values():
        for words in re.findall(r"(?:write|or|and) ((?:-m )?[+\w'/.]+=[^,;…<\[]+?)(?= to |,|;|$| for | leaves)", text):
            value = {"data.root": "folder", "compile": "true"}.get(words.partition("=")[0], "7")
            found.append(words.replace("*", value).replace("'", "").split())
    return [words for words in found if not any(word.startswith(("resume=", "callbacks.checkpoint")) for word in words)]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_what_an_answer_says_is_composed(words: list[str]) -> None:
    if "hydra/sweeper=optuna" in words:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    check_command_line([word for word in words if word != "-m"], multirun="-m" in words)


def rows() -> list[tuple[str, str]]:
    """The rows of the table for those who come from lightning-hydra-template: what they type, and what to type here."""
    lines = (CONFIGS.parent / "docs" / "coming-from-lightning-hydra-template.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [(there, here) for there, here in cells[1:] if not there.startswith("---")]


@pytest.mark.parametrize(("there", "here"), rows())
def test_what_the_table_says_to_type_is_composed(there: str, here: str) -> None:
    command = re.match(r"`python train.py ([^`]*)`", here)
    words = command[1].split() if command else []
    if any(word.startswith("--cfg") or "<" in word for word in words):
        return
    if ("logger=wandb" in words and not is_installed("wandb")) or "hydra/sweeper=optuna" in words:
        pytest.skip("needs an extra")
    check_command_line([word for word in words if word != "-m"], multirun="-m" in words)


@pytest.mark.parametrize("there", [there for there, here in rows() if there.startswith("`") and ".py" not in there])
def test_what_they_type_there_works_or_is_answered(there: str) -> None:
    words = [word.replace("<file>", "x").replace("<folder>", "x") for word in shlex.split(there.split("`")[1])]
    try:
        check_command_line([word for word in words if word != "-m"], multirun="-m" in words)
    except UserError as error:
        assert any(
            sign in str(error) for sign in ("write ", "takes ", "pip install", "pinned", "nothing like it", "always")
        )
