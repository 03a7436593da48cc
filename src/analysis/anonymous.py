"""What a report that is passed on does not tell of its author: home folders, where a path begins, and the name of this host."""

import os
import re
import socket
from pathlib import Path

_HOME = os.path.expanduser("~")  # "/" or "~" where a user has none
_PATH_BEGINS = r"(?:(?<![\w.~/-])|(?<=://))"
_NAME = r"[^/\s\"'<>:;,()\[\]{}\\]+"
_ANY_HOME = rf"[A-Za-z]:[\\/]+[Uu]sers[\\/]+{_NAME}|/(?:home|Users|mnt/[a-z]/Users)/{_NAME}|/root(?![\w.-])"


def anonymous(text: str, host: bool = False) -> str:
    """The text with `~` for home folders; with `host`, also without this host's name, which may be any word."""
    text = re.sub(_homes(), "~", text)
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]} - {"", "localhost"}
    if not host or not names:
        return text
    whole = (rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in sorted(names, key=len, reverse=True))
    return re.sub("|".join(whole), "this-host", text)


def anonymous_command(command: str) -> str:
    """The command with `"$HOME"` for home folders, which a shell replaces behind `=`, too; it replaces nothing within single quotes.

    Of a home of Windows it is `%USERPROFILE%`, which cmd replaces anywhere.
    """
    if "\\" in _HOME:
        return re.sub(_homes(), "%USERPROFILE%", command)
    text, *parts = re.split(_homes(), command)
    for part in parts:
        within = text.replace("'\"'\"'", "").count("'") % 2  # an apostrophe within single quotes is written as that
        text += ("'\"$HOME\"'" if within else '"$HOME"') + part
    return text


def _homes() -> str:
    own = (home for home in (_HOME, os.path.realpath(_HOME), Path(_HOME).as_posix()) if len(Path(home).parts) > 2)
    homes = "|".join([*(re.escape(home) + r"(?![\w-])" for home in own), _ANY_HOME])
    case = "(?i)" if "\\" in _HOME else ""  # which paths of Windows do not have
    return f"{case}{_PATH_BEGINS}(?:{homes})"
