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
SAME = PAGE.partition("work as there:")[2].partition("\n\n")[0]
ANSWERS = {f"{word}=7": text.replace("*", "7").replace("`", "") for word, text in HABITS.items() if word != "run_dir"}
ANSWERS |= {
    "model.optimizer.lr=0.1": "write optimizer=adam",
    "+trainer.gpus=2": "write trainer.accelerator=gpu trainer.devices=2",
    "+extras.print_config=true": "there is nothing like it",
    "paths.data_dir=/data": "write data.root=/data",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_every_word_is_answered_with_its_value_and_stands_for_what_is_below_it(word: str) -> None:
    said = refusal(composed, word)
    assert said.startswith(f"{word.lstrip('+').partition('=')[0].removesuffix('.print_config')}: {ANSWERS[word]}")
    assert answer_to("model.hidden_size", "3") is None


def advised() -> list[str]:
    """The options that the answers tell to write."""
    known = {"compile": "true", "optimizer.lr": "0.1"}
    known |= dict.fromkeys(("data.root", "hydra.run.dir", "tags", "init"), "x")
    left_out = ("resume=", "--", "batchscope ", "_target_", "callbacks.checkpoint", "-m`")
    found = {code for text in HABITS.values() for code in re.findall("`([^`]+)`", text)}
    codes = sorted(code for code in found if "=" in code and not code.startswith(left_out))
    return [re.sub(r"[*…]|<folder>|<file>", known.get(code.partition("=")[0], "7"), code) for code in codes]


@pytest.mark.parametrize("words", [*advised(), *re.findall("`([^`]+)`", SAME)])
def test_what_an_answer_and_the_page_say_to_write_is_taken(words: str) -> None:
    missing = [name for name in ("wandb", "mlflow") if name in words and not is_installed(name)]
    if missing or "hydra/sweeper=optuna" in words:
        pytest.skip("needs an extra")
    check_command_line([word for word in shlex.split(words) if word != "-m"], multirun="-m" in words.split())
