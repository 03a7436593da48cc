"""`batchscope report`: a table, plots and a recommendation, of one or several folders of runs.

    batchscope report outputs/sweeps/<sweep>
    batchscope report last                               # the newest sweep in outputs/sweeps
    batchscope report outputs/sweeps/<one> outputs/sweeps/<another> --out outputs/compared
    batchscope report last --cards=t4,h100               # with a plot of what these cards would do
    batchscope report last --figure=throughput.pdf --width=3.3in

Every run.json in and below the folders is read. The report on one folder is written to <folder>/report, one on several
to the folder that --out names. --figure writes one plot alone, as wide as a paper needs it.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError, did_you_mean
from ..hardware.datasheet import find_cards
from ..records.read import replacing, sweep_folder
from . import command_parser

if TYPE_CHECKING:
    from ..analysis.plots import Drawing

_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
_MIN_WIDTH, _MAX_WIDTH = 2.0, 20.0  # inches


def main() -> None:
    """Parse the command line, write and print the report. Exit code 1 if no run was found, finished or measured."""
    parser = command_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", metavar="folder", help="of a sweep or a run, or last")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the report")
    parser.add_argument("--cards", metavar="t4,l4,…", help="adds samples/s and MFU as predicted on these cards")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write one plot: throughput.pdf, accuracy.svg, …")
    parser.add_argument("--width", type=_parse_width, metavar="3.3in", help="width of the plot, in in, cm or mm (7in)")
    args = parser.parse_args()
    folders = [sweep_folder(name, "report") for name in args.folders]
    if args.figure:
        if args.out or args.cards:
            other = "--out" if args.out else "--cards"
            raise UserError(f"{other} and --figure: only one of them at a time", exit_code=2)
        _write_figure(folders, args.figure, args.width)
        return
    if args.width:
        raise UserError("--width: is the width of a plot; add --figure=throughput.pdf", exit_code=2)
    if len(folders) > 1 and not args.out:  # it must not replace the report on one of them
        raise UserError("--out: is missing; a report on several folders needs a folder of its own", exit_code=2)

    from ..analysis import write_report

    report = write_report(folders, args.out or folders[0] / "report", _draw_use(folders, args.cards))
    print(report.printed, flush=True)
    sys.exit(report.exit_code)


def _draw_use(folders: list[Path], names: str | None) -> "dict[str, Drawing]":
    """Return for each training a plot of its speed on these cards, with a caption, by file name; nothing without cards.

    Raises:
        UserError: for an unknown card, or if no training can be predicted.
    """
    if names is None:
        return {}
    from ..choice.measured import read_trainings
    from ..choice.pictures import draw_use
    from ..choice.rows import Question
    from ..choice.use import use_lines, use_sentence

    question, drawings = Question(find_cards(names, "--cards")), {}
    for training in read_trainings(folders):
        if lines := use_lines(training, question):
            caption = f"{training.title}: samples per second and MFU, measured here and predicted on cards"
            caption = ". ".join(filter(None, [caption, use_sentence(lines).rstrip(".")]))
            drawings[f"use-{len(drawings) + 1}" if drawings else "use"] = (
                caption,
                partial(draw_use, lines, subject=training.subject),
            )
    if not drawings:
        raise UserError("--cards: no training was measured at two batch sizes that surely fit")
    return drawings


def _parse_width(text: str) -> float:
    """Parse a width into inches, as an argparse type: `3.3in`, `84mm`."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?(in|cm|mm)", text.strip())
    inches = float(match[1]) * _INCHES[match[2]] if match else 0.0
    if not _MIN_WIDTH <= inches <= _MAX_WIDTH:
        raise argparse.ArgumentTypeError(
            f"takes {_MIN_WIDTH:g}in to {_MAX_WIDTH:g}in, such as 3.3in or 84mm, got {text!r}"
        )
    return inches


def _write_figure(folders: list[Path], path: Path, width: float | None) -> None:
    """Write one plot of the runs; UserError for an unknown plot, or one for which these runs have no numbers."""
    from ..analysis import analyse, plots

    name, suffix = path.stem, path.suffix.removeprefix(".")
    if name not in plots.CAPTIONS or suffix not in plots.FORMATS:
        names = f"{', '.join(plots.CAPTIONS)} as .{', .'.join(plots.FORMATS)}"
        near = "" if name in plots.CAPTIONS else did_you_mean(name, plots.CAPTIONS)
        raise UserError(f"--figure: got '{path.name}'; there are {names}.{near}", exit_code=2)
    figures = plots.figures(analyse(folders), **({"width": width} if width else {}))
    if name not in figures:
        raise UserError(f"--figure: these runs have no {name}; they have {', '.join(figures) or 'none'}")
    with replacing(path, "--figure") as file:
        file.write(plots.saved(figures[name], name, suffix))
    print(f"figure   {path}", flush=True)
