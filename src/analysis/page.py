"""`report.html`: the report as one file for a browser, with nothing loaded and nothing sent.

The answer comes first. What is drawn of a run and its row in the table have the attribute `data-runs`, by which the script in
page.html picks a run everywhere. What a record says is escaped. Home folders, where a path begins, and the name of this host are
replaced in what is shown, never in attributes.
"""

import os
import re
import shlex
import socket
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ..errors import printable
from . import table
from .plots import CAPTIONS, Picture
from .text import is_number_column

if TYPE_CHECKING:
    from .report import Report

FILE = "report.html"
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_GID = re.compile(r"run-(\d+(?:_\d+)*)")
_HOME = os.path.expanduser("~")  # "/" or "~" where a user has none
_PATH_BEGINS = r"(?:(?<![\w.~/-])|(?<=://))"
_ANY_HOME = r"/(?:home|Users)/[^/\s\"'<>:;,()\[\]{}\\]+|/root(?![\w.-])"


def page(report: "Report", pictures: Mapping[str, Picture]) -> str:
    """The page."""
    plots = (
        f"<figure>{_svg(picture.svg, CAPTIONS[name])}<figcaption>{CAPTIONS[name]}.</figcaption></figure>"
        for name, picture in pictures.items()
    )
    notes = "".join(f"<li>{_shown(note, host=True)}</li>" for note in report.notes)
    return Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")).substitute(
        title=_shown(report.title),
        answer=_answer(report),
        sizes=_sizes(report),
        counts=_shown(report.counts),
        plots="".join(plots),
        runs=_table(report),
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
    )


def _answer(report: "Report") -> str:
    several, parts = len(report.sweep.groups) > 1, []
    for one in report.statements:
        parts += [f"<h2>{_shown(one.group.label)}</h2>"] if several and one.group else []
        parts += [f"<p>{_shown(line)}</p>" for line in one.lines]
        parts += [f"<pre>{escape(anonymous_command(one.command))}</pre>"] if one.command else []
    return "".join(parts)


def _sizes(report: "Report") -> str:
    """The table of each group with several batch sizes."""
    parts = []
    for group, texts in report.size_texts:
        cells = texts.rename(lambda size: f"{size:,}").reset_index(names="batch size")
        rows = ("".join(f"<td>{_shown(cell)}</td>" for cell in line) for line in cells.to_numpy().tolist())
        headings = "".join(f'<th scope="col">{_shown(str(heading))}</th>' for heading in cells)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        caption = f"<caption>{_shown(group.label)}</caption>"
        parts.append(f'<table class="sizes">{caption}<thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>')
    return "".join(parts)


def _table(report: "Report") -> str:
    cells = table.shown(report.sweep, report.frame)
    kinds = [' class="number"' if is_number_column(cells[heading]) else "" for heading in cells]
    headings = (
        f'<th scope="col"{kind}><button>{_shown(str(heading))}</button></th>'
        for heading, kind in zip(cells, kinds, strict=True)
    )
    rows = (
        f'<tr data-runs="{number}" tabindex="0" aria-selected="false">'
        + "".join(f"<td{kind}>{_shown(cell, host=True)}</td>" for cell, kind in zip(line, kinds, strict=True))
        + "</tr>"
        for number, line in enumerate(cells.to_numpy().tolist())
    )
    return f'<table role="grid"><thead><tr>{"".join(headings)}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _svg(text: str, caption: str) -> str:
    """matplotlib's SVG as an element of the page: only the ids that it refers to stay, and `data-runs` names runs."""
    root = ET.fromstring(text)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": caption}
    for parent in list(root.iter()):
        for child in [one for one in parent if one.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style")]:
            parent.remove(child)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    for element in root.iter():
        if (name := element.attrib.get("id")) and name not in used:
            del element.attrib["id"]
            if found := _GID.fullmatch(name):
                element.attrib["data-runs"] = found[1].replace("_", " ")
        if element.tag == f"{{{_SVG}}}text" and element.text:
            element.text = anonymous(element.text)
    return ET.tostring(root, encoding="unicode")


def _shown(text: str, host: bool = False) -> str:
    return escape(anonymous(printable(text), host))


def anonymous_command(command: str) -> str:
    """The command with `"$HOME"` for this user's home folder, which a shell expands within a word, as it does not with `~`.

    The home folder of another user is `'<home>'`, so that the command fails where the name is missing.
    """
    own, words = _own_homes(), []
    for word in shlex.split(printable(command)):
        texts = [shlex.quote(text) if text else "" for text in re.split(_homes(), word)]
        homes = ['"$HOME"' if home in own else "'<home>'" for home in re.findall(_homes(), word)]
        words.append("".join(map("".join, zip(texts, [*homes, ""], strict=True))) or "''")
    return " ".join(words)


def _own_homes() -> set[str]:
    """This user's home folder, by its name and where it really is."""
    return {_HOME, os.path.realpath(_HOME)}


def _homes() -> str:
    """The pattern of a home folder: this user's, or anybody's in the usual places."""
    places = (home for home in sorted(_own_homes()) if len(Path(home).parts) > 2)
    own = (re.escape(home) + r"(?![\w-])" for home in places)
    return f"{_PATH_BEGINS}(?:{'|'.join([*own, _ANY_HOME])})"


def anonymous(text: str, host: bool = False) -> str:
    """The text with `~` for home folders; with `host`, also without this host's name, which may be any word."""
    text = re.sub(_homes(), "~", text)
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]} - {"", "localhost"}
    if not host or not names:
        return text
    whole = (rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in sorted(names, key=len, reverse=True))
    return re.sub("|".join(whole), "this-host", text)
