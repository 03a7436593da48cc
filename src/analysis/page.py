"""`report.html`: the report as one file for a browser, with nothing loaded and nothing sent.

The answer comes first. The row of a run, and every element of a plot that shows it, have the attribute `data-runs`, by which the
script in page.html picks a run everywhere. Texts of records are escaped, and name neither a home folder nor this host (anonymous.py).
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
from .anonymous import anonymise, anonymous_command
from .report import Picture, Report
from .text import is_number_column

_MAY_HAVE_HOST = ("run", "why not finished")  # in a setting, the host's name is an ordinary word
_PLOTS = """<h2>Plots</h2>
<p class="hint">A click on a point, a bar or a row of runs picks its run everywhere, and Shift adds one; a second click,
or one beside the marks, ends it.</p>
<section id="plots">{}</section>"""
_TYPES = {"png": "image/png", "svg": "image/svg+xml", "pdf": "application/pdf"}


def page(report: Report) -> str:
    """Return the content of the page."""
    runs, settings, method = table.run_texts(report.sweep, report.frame), report.setting_texts, report.methods
    groups = zip(report.answers, report.size_texts, strict=True)
    sizes = [_table(texts.reset_index(), answer.group.label) for answer, texts in groups if len(texts)]
    sizes += [_table(settings, "Settings")] if len(settings) else []
    notes = "".join(f"<li>{_safe(note, host=True)}</li>" for note in report.notes)
    facts = (f"<tr><th>{_safe(name)}</th><td>{_safe(text)}</td></tr>" for name, text in method.facts.items())
    quote = f'<p class="hint">To quote:</p>\n{_with_copy_button("p", method.sentence)}' if method.sentence else ""
    return Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")).substitute(
        title=_safe(report.title),
        answer=_answer(report),
        sizes="".join(sizes),
        legend=_safe(report.legend),
        counts=_safe(report.counts),
        plots=_PLOTS.format("".join(starmap(_figure, report.pictures.items()))) if report.pictures else "",
        runs=_table(runs, "", is_of_runs=True),
        legend_of_runs=_safe(table.legend(runs)),
        facts="".join(facts),
        commands="".join(_with_copy_button("pre", command) for command in method.commands),
        sentence=quote,
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
    )


def _answer(report: Report) -> str:
    parts = []
    for answer in report.answers:
        has_heading = len(report.answers) > 1 and answer.lines
        parts += [f"<h2>{_safe(answer.group.label)}</h2>"] if has_heading else []
        parts += [f"<p>{_safe(line)}</p>" for line in answer.lines]
    parts += [f"<p>{_safe(line)}</p>" for line in report.remarks]
    if report.commands:
        commands = (_with_copy_button("pre", command) for command in report.commands)
        parts += ["<p>Options of the command that would tell more:</p>", *commands]
    return "".join(parts)


def _with_copy_button(tag: str, text: str) -> str:
    """Return a text with a button that copies it; the text is a command if the tag is `pre`."""
    content = escape(anonymous_command(printable(text))) if tag == "pre" else _safe(text)
    return f'<div class="copied"><{tag}>{content}</{tag}><button type="button">copy</button></div>'


def _figure(name: str, picture: Picture) -> str:
    """Return a plot with its caption, and with a link for each format that holds the file, so that the page can be sent alone."""
    caption = _safe(picture.caption)
    links = " ".join(
        f'<a class="button" download="{name}.{kind}" href="data:{_TYPES[kind]};base64,'
        f'{base64.b64encode(content).decode()}">{kind.upper()}</a>'
        for kind, content in picture.files.items()
    )
    return f"<figure>{_svg(picture.on_page, caption)}<figcaption>{caption}. {links}</figcaption></figure>"


def _table(cells: pd.DataFrame, caption: str, is_of_runs: bool = False) -> str:
    """Return a table of texts that a click on a heading sorts; if it `is_of_runs`, a click on a row picks the run."""
    classes = [' class="number"' if is_number_column(cells[heading]) else "" for heading in cells]
    headings = (
        f'<th scope="col"{css}><button>{_safe(str(heading))}</button></th>'
        for heading, css in zip(cells, classes, strict=True)
    )
    rows = (
        (f'<tr data-runs="{number}" tabindex="0" aria-selected="false">' if is_of_runs else "<tr>")
        + "".join(
            f"<td{css}>{_safe(cell, heading in _MAY_HAVE_HOST)}</td>"
            for heading, cell, css in zip(cells, row, classes, strict=True)
        )
        + "</tr>"
        for number, row in enumerate(cells.to_numpy().tolist())
    )
    begin = ('<table role="grid">' if is_of_runs else "<table>") + f"<caption>{_safe(caption)}</caption>"
    return f"{begin}<thead><tr>{''.join(headings)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _svg(text: str, caption: str) -> str:
    """Return matplotlib's SVG as an element of the page: it keeps the ids that it refers to; those of runs become `data-runs`."""
    referenced = set(re.findall(r'(?:href="|url\()#([^")]+)', text))

    def attribute(match: re.Match[str]) -> str:
        if match[1] in referenced:
            return match[0]
        return f' data-runs="{match[1][4:].replace("_", " ")}"' if match[1].startswith("run-") else ""

    element = re.sub(r' id="([^"<>]*)"', attribute, text[text.index("<svg ") :])
    return element.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)


def _safe(text: str, host: bool = False) -> str:
    return escape(anonymise(printable(text), host))
