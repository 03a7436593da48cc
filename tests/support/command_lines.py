"""Command lines in the tests' own process: what they compose, what the program answers, and how it refuses."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from batchscope import __main__ as program
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line


def composed(*words: str) -> dict[str, Any]:
    """The checked configuration of one run."""
    return check_command_line([*words], multirun=False)[0]


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Answer(NamedTuple):
    """Exit code, standard output and standard error of the program."""

    code: int | str | None
    out: str
    err: str


def answer(*words: object) -> Answer:
    """What `batchscope <words>` answers."""
    argv, main_module, out, err = sys.argv, sys.modules["__main__"], io.StringIO(), io.StringIO()
    spec = main_module.__spec__  # the program changes it, for other ranks
    sys.argv = ["batchscope", *map(str, words)]
    os.environ.pop("HYDRA_FULL_ERROR", None)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            program.main()
        code: int | str | None = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv, main_module.__spec__ = argv, spec
    return Answer(code, out.getvalue(), err.getvalue())
