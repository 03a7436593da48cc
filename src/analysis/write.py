"""write_report: the folders of a sweep → report.md, report.html, answer.json, sweep.csv, plots and files for TensorBoard."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import UserError
from ..files import refuse_links, why, write_bytes, write_text
from . import answer_file, page, plots, tensorboard
from .anonymous import anonymise
from .report import PAGE, Report, analyse

_WRITTEN = ("report.*", "answer.*", "sweep.*", "*.png", "*.svg", "*.pdf", "tensorboard")


def write_report(
    folders: Iterable[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    more: Mapping[str, plots.Drawing] | None = None,
) -> Report:
    """Read all runs below the folders, and write the report, with `more` plots by their names. Replace files of an earlier report.

    Raises:
        UserError: before anything is written, if there is no readable record, or if `out_dir` is or holds a link that leads
            elsewhere; later, if `out_dir` cannot be written.
    """
    paths, out = [Path(folder) for folder in folders], Path(out_dir)
    report = analyse(paths)
    # The default `out_dir` lies in a folder that may be anybody's: by links, its author could have files elsewhere written or
    # deleted. Any other `out_dir` was typed by the user.
    out_path = Path(os.path.abspath(out))
    root = next((folder for folder in paths if out_path == Path(os.path.abspath(folder)) / "report"), None)
    refuse_links(out, "the report's folder", root, _WRITTEN)
    report.pictures.update(plots.draw(report, more))
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, picture in report.pictures.items():
            for kind, content in picture.files.items():
                write_bytes(out / f"{name}.{kind}", content)
                report.files.append(out / f"{name}.{kind}")
        tensorboard.write(report.sweep.groups, report.tables, out / "tensorboard")
        cells = report.frame.copy()
        for name in map(str, cells):
            may_have_host = name in ("run", "reason")  # in a setting, the host's name is an ordinary word
            cells[name] = [anonymise(cell, may_have_host) if isinstance(cell, str) else cell for cell in cells[name]]
        texts = {
            "report.md": report.markdown,
            PAGE: page.page(report),
            answer_file.FILE: answer_file.answer_text(report),
            "sweep.csv": cells.to_csv(index=False, lineterminator="\n"),
        }
        for name, text in texts.items():
            write_text(out / name, text)
            report.files.append(out / name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {why(error)}") from error
    return report
