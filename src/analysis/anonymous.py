"""Remove from a report what identifies its author: home folders at the begin of a path, and the name of this host."""

import os
import re
import socket
from pathlib import Path

_HOME = os.path.expanduser("~")  # "/" or "~" where a user has none
_PATH_BEGINS = r"(?:(?<![\w.~/-])|(?<=://))"
_NAME = r"[^/\s\"'<>:;,()\[\]{}\\]+"
_ANY_HOME = rf"[A-Za-z]:[\\/]+[Uu]sers[\\/]+{_NAME}|/(?:home|Users|mnt/[a-z]/Users)/{_NAME}|/root(?![\w.-])"


def anonymise(text: str, host: bool = False) -> str:
    """Replace home folders by `~`; with `host`, also replace this host's name, which may be an ordinary word."""
    text = re.sub(_home_pattern(), "~", text)
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]} - {"", "localhost"}
    if not host or not names:
        return text
    patterns = (rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in sorted(names, key=len, reverse=True))
    return re.sub("|".join(patterns), "this-host", text)


def anonymous_command(command: str) -> str:
    """Replace home folders in a command by `"$HOME"`, which a shell expands behind `=`, too, but not within single quotes.

    A home folder of Windows becomes `%USERPROFILE%`, which cmd expands anywhere.
    """
    if "\\" in _HOME:
        return re.sub(_home_pattern(), "%USERPROFILE%", command)
    text, *parts = re.split(_home_pattern(), command)
    for part in parts:
        is_quoted = text.replace("'\"'\"'", "").count("'") % 2  # how an apostrophe is quoted is not counted
        text += ("'\"$HOME\"'" if is_quoted else '"$HOME"') + part
    return text


def _home_pattern() -> str:
    paths = (path for path in (_HOME, os.path.realpath(_HOME), Path(_HOME).as_posix()) if len(Path(path).parts) > 2)
    homes = "|".join([*(re.escape(path) + r"(?![\w-])" for path in paths), _ANY_HOME])
    case = "(?i)" if "\\" in _HOME else ""  # paths of Windows ignore case
    return f"{case}{_PATH_BEGINS}(?:{homes})"
