"""A message is one line, and ends behind a whole word where it is cut."""

import errno
import os

import pytest

from batchscope.errors import UserError, cut, in_one_line
from batchscope.files import why


@pytest.mark.parametrize(
    ("text", "width", "said"),
    [
        ("weights of 6,460,241 numbers", 28, "weights of 6,460,241 numbers"),
        ("weights of 6,460,241 numbers", 27, "weights of 6,460,241 …"),
        ("weights of 6,460,241 numbers", 20, "weights of …"),
        ("weights_of_6,460,241_numbers", 20, "weights_of_6,460,2 …"),
    ],
)
def test_a_text_that_is_cut_ends_behind_a_word(text: str, width: int, said: str) -> None:
    assert cut(text, width) == said
    assert len(said) <= width


def test_a_message_keeps_the_whole_words_of_its_beginning_and_its_end() -> None:
    said = str(UserError(f"option: got {'6,460,241 ' * 200}; write model=cnn"))
    assert len(said) <= 1000
    assert {*said.split()} == {"option:", "got", "6,460,241", "…", ";", "write", "model=cnn"}
    assert in_one_line(ValueError("6,460,241 " * 50)).removesuffix(" …").endswith(" 6,460,241")


def test_a_file_larger_than_the_limit_of_the_process_is_no_full_disk() -> None:
    said = "the system allows no file of this size, as `ulimit -f` sets it (File too large)"
    assert why(OSError(errno.EFBIG, os.strerror(errno.EFBIG))) == said
