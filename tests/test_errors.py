"""A message is one line, and ends behind a whole word where it is cut."""

import pytest

from batchscope.errors import UserError, cut, exit_on_user_error, in_one_line


@pytest.mark.parametrize(
    ("text", "width", "shortened"),
    [
        ("weights of 6,460,241 numbers", 28, "weights of 6,460,241 numbers"),
        ("weights of 6,460,241 numbers", 27, "weights of 6,460,241 …"),
        ("weights of 6,460,241 numbers", 20, "weights of …"),
        ("weights_of_6,460,241_numbers", 20, "weights_of_6,460,2 …"),
    ],
)
def test_a_text_that_is_cut_ends_behind_a_word(text: str, width: int, shortened: str) -> None:
    assert cut(text, width) == shortened
    assert len(shortened) <= width


def test_a_mistake_is_one_line_with_the_blanks_of_its_words() -> None:
    assert str(UserError("write 'data.root=/my  data'\n  here")) == "write 'data.root=/my  data' here"


def test_an_error_is_named_in_one_line_that_ends_behind_a_word() -> None:
    assert in_one_line(ValueError("6,460,241 " * 50)).removesuffix(" …").endswith(" 6,460,241")


def test_a_broken_pipe_that_is_not_the_standard_output_is_an_error() -> None:  # the other is in cli/test_main.py
    def breaks() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        exit_on_user_error(breaks)
