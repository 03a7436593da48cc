"""Running a command in the tests' own process."""

import sys
from types import ModuleType

import pytest


def exit_code(command: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> int | str | None:
    """The exit code of a command with these words."""
    monkeypatch.setattr(sys, "argv", [f"batchscope {command.__name__.rpartition('.')[2]}", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        command.main()
    return end.value.code
