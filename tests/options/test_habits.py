"""A word typed by habit is answered in one line with what to write here; what it says, and what the docs say, is right."""

import re
import shlex

import pytest

from batchscope.options.compose import check_command_line
from batchscope.options.groups import CONFIGS
from batchscope.options.habits import HABITS, answer_to
from batchscope.options.signatures import is_installed
from tests.support.command_lines import composed, refusal

PAGE = (CONFIGS.parent / "docs" / "commands.md").read_text(encoding="utf-8").partition("## Coming from")[2]


def takes(words: list[str]) -> None:
    """Raise unless a command line is taken; skip what an extra installs."""
    missing = [name for name in ("wandb", "mlflow") if name in "".join(words) and not is_installed(name)]
    if missing or "hydra/sweeper=optuna" in words:
        pytest.skip("needs an extra")
    check_command_line([word for word in words if word != "-m"], multirun="-m" in words)


@pytest.mark.parametrize("word", [word for word in HABITS if word != "run_dir"])
def test_every_word_is_answered(word: str) -> None:
    assert refusal(composed, f"{word}=7") == f"{word}: {HABITS[word].replace('*', '7').replace('`', '')}"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.optimizer.lr=0.1", "model.optimizer.lr: write optimizer=adam"),
        ("+trainer.gpus=2", "trainer.gpus: write trainer.accelerator=gpu trainer.devices=2"),
        ("+extras.print_config=true", "extras: there is nothing like it"),
        ("paths.data_dir=/data", "paths.data_dir: write data.root=/data"),
    ],
)
def test_a_word_stands_for_what_is_below_it_with_its_value_and_a_plus(word: str, said: str) -> None:
    assert refusal(composed, word).startswith(said)


def test_another_word_has_no_answer() -> None:
    assert answer_to("model.hidden_size", "3") is None


def advised() -> list[str]:
    """The options that the answers tell to write."""
    found = (code for text in HABITS.values() for code in re.findall("`([^`]+)`", text))
    left_out = ("resume=", "--", "batchscope ", "_target_", "callbacks.checkpoint", "-m`")
    return sorted({code for code in found if "=" in code and not code.startswith(left_out)})


@pytest.mark.parametrize("code", advised())
def test_what_an_answer_says_is_taken(code: str) -> None:
    known = {"compile": "true", "data.root": "x", "hydra.run.dir": "x", "tags": "x", "optimizer.lr": "0.1", "init": "x"}
    value = known.get(code.partition("=")[0], "7")
    takes(shlex.split(re.sub(r"[*…]|<folder>|<file>", value, code)))


SAME = PAGE.partition("work as there:")[2].partition("\n\n")[0]


@pytest.mark.parametrize("words", re.findall("`([^`]+)`", SAME))
def test_what_the_page_says_to_work_works(words: str) -> None:
    takes(shlex.split(words))
