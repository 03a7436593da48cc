"""`report.html`: the report as one file to open in a browser, with Bokeh's scripts in it and no network.

The recommendation comes first. Plots and table share one data source with a row for each run, so that a run that is
picked in one of them is picked in all.
"""

import math
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, DataTable, Model, NumberFormatter, StringFormatter, TableColumn
from bokeh.resources import Resources
from bokeh.themes import Theme

from ..errors import printable
from ..records.formatting import option_value
from ..records.metrics import RUN_METRICS, metric
from . import table
from .groups import SweepResults
from .html_plots import Plots
from .recommend import Analysis, Recommendation
from .run import BATCH_SIZE

# Nothing is loaded that is not in the file, and nothing is sent.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
_DARK = "#1a1a1a"
_AXIS = {"axis_label_text_font_style": "normal", "axis_label_text_font_size": "14px", "axis_label_text_color": _DARK}
_AXIS |= {"major_label_text_font_size": "13px", "major_label_text_color": _DARK, "minor_tick_line_color": None}
_LEGEND = {"label_text_color": _DARK, "label_text_font_size": "13px", "border_line_color": None, "padding": 2}
_THEME = {
    "Title": {"text_color": _DARK, "text_font_size": "15px"},
    "Axis": _AXIS,
    "Legend": _LEGEND,
    "Grid": {"grid_line_color": "#dddddd"},
    "Plot": {"outline_line_color": None},
}
_STYLE = """
body { color: #1a1a1a; background: white; font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; margin: 0 auto;
       max-width: 1500px; padding: 14px 22px 40px; overflow-wrap: anywhere; }
h1 { font-size: 21px; margin: 0 0 6px; }
h2 { font-size: 17px; margin: 26px 0 6px; }
p { margin: 4px 0; }
.hint { color: #444; }
#recommendation { border-left: 5px solid #0072B2; background: #eef5fa; padding: 8px 14px; margin: 8px 0; }
#recommendation p { font-weight: 600; }
#recommendation p.remark { font-weight: 400; padding-left: 1.2em; }
table.plain { border-collapse: collapse; }
.plain th { overflow-wrap: normal; }
.plain th, .plain td { padding: 3px 14px 3px 0; text-align: right; }
.plain th { border-bottom: 1px solid #999; }
.plain th:first-child, .plain td:first-child { text-align: left; }
"""
_CELLS = """
:host { font: 14px system-ui, "DejaVu Sans", sans-serif; }
.slick-header-column, .slick-cell { color: #1a1a1a; }
.slick-header-column { background: #f0f0f0; font-weight: 600; }
.slick-cell.selected { background-color: #cfe6f5; }
"""
_HINT = (
    "A click on a point, a bar, a curve or a row picks a run everywhere; Shift adds one, Esc ends it. "
    "A click on a heading sorts the table, one on a name above a plot hides it."
)
_HEAD = """
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
"""
_ROW_PX, _MOST_ROWS = 26, 16  # of the table
_WIDE_PX, _NARROW_PX, _LETTER_PX = 320, 60, 8.5


@dataclass(frozen=True)
class Text:
    """What the page says beside plots and runs."""

    title: str
    headlines: list[str]  # a remark on the line before begins with two spaces
    counts: str
    fits: list[list[str]]  # a table with its headings; empty without a fit
    about_fits: str
    seeds: list[list[str]]  # the same for what several seeds gave
    about_seeds: str
    notes: list[str]


def page(sweep: SweepResults, analyses: Sequence[Analysis], recommended: Sequence[Recommendation], text: Text) -> str:
    """The page. What the runs say of themselves is escaped, and home folders and this host's name are left out."""
    plots = Plots(sweep.runs, analyses, recommended)
    lines = [row(*figures, sizing_mode="stretch_width", styles={"flex-wrap": "wrap"}) for figures in plots.rows()]
    roots: dict[str, Model] = {"runs": _table(sweep, plots.source)}
    if lines:
        roots["plots"] = column(*lines, sizing_mode="stretch_width")
    script, divs = components(roots, theme=Theme(json={"attrs": _THEME}))
    body = [
        f"<h1>{_safe(text.title)}</h1>",
        '<div id="recommendation">',
        *(f"<p{_class_of(line)}>{_safe(line.strip())}</p>" for line in text.headlines),
        "</div>",
        f"<p>{_safe(text.counts)}.</p>",
        f'<p class="hint">{_HINT}</p>',
        divs.get("plots", ""),
        f"<h2>Runs</h2>{divs['runs']}",
        f"<h2>Repeated runs</h2><p>{_safe(text.about_seeds)}</p>{_rows(text.seeds)}" if text.seeds else "",
        f"<h2>The time of a step</h2><p>{_safe(text.about_fits)}</p>{_rows(text.fits)}" if text.fits else "",
        f"<h2>Notes</h2><ul>{''.join(f'<li>{_safe(note)}</li>' for note in text.notes)}</ul>" if text.notes else "",
        script,
    ]
    scripts = Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"]).render_js()
    head = _HEAD.format(policy=_POLICY, title=_safe(text.title), style=_STYLE)
    private = anonymous("\n".join(body))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}{scripts}</head>\n<body>\n{private}\n</body>\n</html>\n'


def _safe(text: str) -> str:
    return escape(printable(text))


def _class_of(headline: str) -> str:
    return ' class="remark"' if headline.startswith("  ") else ""


def _rows(cells: Sequence[Sequence[str]]) -> str:
    kinds = ["th", *["td"] * (len(cells) - 1)]
    lines = (
        "".join(f"<{kind}>{_safe(cell)}</{kind}>" for cell in line) for kind, line in zip(kinds, cells, strict=True)
    )
    return f'<table class="plain">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'


def anonymous(text: str) -> str:
    """The text with `~` for home folders, and without this host's name."""
    homes = [re.escape(str(Path.home())), r"/(?:home|Users)/[^/\s\"'<>:;,\\]+", r"/root(?=[/\s\"'<>:;,]|$)"]
    text = re.sub("|".join(homes), "~", text)
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]} - {"", "localhost"}
    whole = (rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in sorted(names, key=len, reverse=True))
    return re.sub("|".join(whole), "this-host", text) if names else text


def _table(sweep: SweepResults, source: ColumnDataSource) -> DataTable:
    """The runs, a row each: sorted by a click on a heading, numbers as numbers."""
    rows = table.rows(sweep)
    columns = [_column(source, "name", "run", [row["run"] for row in rows])]
    for key in (key for key in sweep.varied if key != BATCH_SIZE):
        values = [run.settings.get(key) for run in sweep.runs]
        columns.append(_column(source, f"set {key}", key.rpartition(".")[2], values))
    shown = [name for name, declared in RUN_METRICS.items() if declared.heading]
    shown += table.shown_metrics(sweep)
    for name in dict.fromkeys(shown):
        if any(name in row for row in rows):
            declared = metric(name)
            texts = [declared.text(row[name]) if name in row else "" for row in rows]
            unit = ", %" if any(text.endswith(" %") for text in texts) and not declared.heading else ""
            columns.append(_column(source, f"cell {name}", f"{declared.heading or name}{unit}", map(_number, texts)))
    if any("tags" in row for row in rows):
        columns.append(_column(source, "tags", "tags", [row.get("tags", "") for row in rows]))
    if any("reason" in row for row in rows):
        columns.append(_column(source, "reason", "why not finished", [row.get("reason", "") for row in rows]))
    lines = min(len(rows), _MOST_ROWS)
    return DataTable(
        source=source,
        columns=columns,
        index_position=None,
        height=_ROW_PX * (lines + 2),
        row_height=_ROW_PX,
        sizing_mode="stretch_width",
        autosize_mode="none",
        reorderable=False,
        stylesheets=[_CELLS],
    )


def _number(text: str) -> float:
    """The number that a text shows, with its digits and in its unit; NaN for an empty one."""
    return float(text.removesuffix(" %").replace(",", "")) if text else math.nan


def _column(source: ColumnDataSource, field: str, heading: str, values: Iterable[Any]) -> TableColumn:
    values = list(values)
    known = [value for value in values if value not in (None, "")]
    width = _LETTER_PX * max([len(heading), *(len(str(value)) for value in known)], default=1) + 14
    width = round(min(_WIDE_PX, max(_NARROW_PX, width)))
    if known and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        source.data[field] = [math.nan if value is None else float(value) for value in values]
        formatter = NumberFormatter(format="0,0.[0000000]", nan_format="", text_align="right")
    else:
        source.data[field] = ["" if value is None else _as_text(value) for value in values]
        formatter = StringFormatter(nan_format="")
    return TableColumn(field=field, title=_safe(heading), formatter=formatter, width=width)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else option_value(value)
