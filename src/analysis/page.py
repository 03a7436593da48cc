"""`report.html`: the report as one file for a browser, with nothing loaded and nothing sent.

The answer comes first. What is drawn of a run and its row in the table have the attribute `data-runs`, by which the script in
page.html picks a run everywhere. What a record says is escaped, and names neither a home folder nor this host (anonymous.py).
"""

import base64
import re
from html import escape
from itertools import starmap
from pathlib import Path
from string import Template

import pandas as pd

from ..errors import printable
from . import table
from .anonymous import anonymous, anonymous_command
from .report import Picture, Report
from .text import is_number_column

_MAY_HAVE_HOST = ("run", "why not finished")  # in a setting the host's name is another word
_PLOTS = """<h2>Plots</h2>
<p class="hint">A click on a point, a bar or a row of runs picks its run everywhere, and Shift adds one; a second click,
or one beside the marks, ends it.</p>
<section id="plots">{}</section>"""
_TYPES = {"png": "image/png", "svg": "image/svg+xml", "pdf": "application/pdf"}


def page(report: Report) -> str:
    """The page."""
    runs, settings, done = table.run_texts(report.sweep, report.frame), report.setting_texts, report.methods
    groups = zip(report.answers, report.size_texts, strict=True)
    sizes = [_table(texts.reset_index(), of.group.label) for of, texts in groups if len(texts)]
    sizes += [_table(settings, "Settings")] if len(settings) else []
    notes = "".join(f"<li>{_shown(note, host=True)}</li>" for note in report.notes)
    facts = (f"<tr><th>{_shown(n)}</th><td>{_shown(t)}</td></tr>" for n, t in done.facts.items())
    quoted = f'<p class="hint">To quote:</p>\n{_copied("p", done.sentence)}' if done.sentence else ""
    return Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")).substitute(
        title=_shown(report.title),
        answer=_answer(report),
        sizes="".join(sizes),
        legend=_shown(report.legend),
        counts=_shown(report.counts),
        plots=_PLOTS.format("".join(starmap(_figure, report.pictures.items()))) if report.pictures else "",
        runs=_table(runs, "", of_runs=True),
        legend_of_runs=_shown(table.legend(runs)),
        facts="".join(facts),
        commands="".join(_copied("pre", command) for command in done.commands),
        sentence=quoted,
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
    )


def _answer(report: Report) -> str:
    parts = []
    for of_group in report.answers:
        has_heading = len(report.answers) > 1 and of_group.lines
        parts += [f"<h2>{_shown(of_group.group.label)}</h2>"] if has_heading else []
        parts += [f"<p>{_shown(line)}</p>" for line in of_group.lines]
    parts += [f"<p>{_shown(line)}</p>" for line in report.remarks]
    if report.commands:
        parts += ["<p>Options of the command that would tell more:</p>", *(_copied("pre", c) for c in report.commands)]
    return "".join(parts)


def _copied(tag: str, text: str) -> str:
    """A text with a button that copies it; a command where the tag is `pre`."""
    shown = escape(anonymous_command(printable(text))) if tag == "pre" else _shown(text)
    return f'<div class="copied"><{tag}>{shown}</{tag}><button type="button">copy</button></div>'


def _figure(name: str, picture: Picture) -> str:
    """A plot with its caption, and a link for each format with the file in it, so that the page can be sent alone."""
    caption = _shown(picture.caption)
    links = " ".join(
        f'<a class="button" download="{name}.{kind}" href="data:{_TYPES[kind]};base64,'
        f'{base64.b64encode(content).decode()}">{kind.upper()}</a>'
        for kind, content in picture.files.items()
    )
    return f"<figure>{_svg(picture.on_page, caption)}<figcaption>{caption}. {links}</figcaption></figure>"


def _table(cells: pd.DataFrame, caption: str, of_runs: bool = False) -> str:
    """A table of texts that a click on a heading sorts; a click on a row `of_runs` picks the run."""
    kinds = [' class="number"' if is_number_column(cells[heading]) else "" for heading in cells]
    headings = (
        f'<th scope="col"{kind}><button>{_shown(str(heading))}</button></th>'
        for heading, kind in zip(cells, kinds, strict=True)
    )
    rows = (
        (f'<tr data-runs="{number}" tabindex="0" aria-selected="false">' if of_runs else "<tr>")
        + "".join(
            f"<td{kind}>{_shown(cell, heading in _MAY_HAVE_HOST)}</td>"
            for heading, cell, kind in zip(cells, line, kinds, strict=True)
        )
        + "</tr>"
        for number, line in enumerate(cells.to_numpy().tolist())
    )
    begin = ('<table role="grid">' if of_runs else "<table>") + f"<caption>{_shown(caption)}</caption>"
    return f"{begin}<thead><tr>{''.join(headings)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _svg(text: str, caption: str) -> str:
    """matplotlib's SVG as an element of the page: only the ids that it refers to stay, and `data-runs` names runs."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))

    def attribute(found: re.Match[str]) -> str:
        if found[1] in used:
            return found[0]
        return f' data-runs="{found[1][4:].replace("_", " ")}"' if found[1].startswith("run-") else ""

    element = re.sub(r' id="([^"<>]*)"', attribute, text[text.index("<svg ") :])
    return element.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)


def _shown(text: str, host: bool = False) -> str:
    return escape(anonymous(printable(text), host))
