"""`answer.json`: the answer of a report for programs, with the numbers behind it; docs/batch-size.md lists its fields."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd

from .._system import command_line, relative
from ..errors import UserError
from ..files import why
from ..records.rates import RATE
from .anonymous import anonymise
from .answer import Answer
from .between_groups import best_setting
from .groups import Group
from .report import Report

FILE = "answer.json"
SCHEMA = 1  # until 1.0 a file of another schema is refused


def answer_text(report: Report) -> str:
    """Return the content of the file, which names no home folder."""
    compares_sizes = any(answer.compares_sizes for answer in report.answers)
    best = None if compares_sizes else best_setting(report.sweep, report.metrics)
    content = {
        "schema": SCHEMA,
        "enough": report.enough,
        "groups": [*map(_group, report.answers, report.tables)],
        "best_setting": json.loads(json.dumps(best), parse_constant=str),  # NaN, which JSON does not have
        "lines": report.headlines,
    }
    return anonymise(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def _group(answer: Answer, sizes: pd.DataFrame) -> dict[str, Any]:
    group, size, quality = answer.group, answer.size, answer.quality
    selection, settings = answer.selection or answer.overall, group.runs[0].settings
    share = selection.shares.get(size) if selection and size is not None else None
    return {
        "label": group.label,
        **{key: settings.get(key) for key in ("model", "data", "device", "device_name")},
        "chosen": size,
        "rule": answer.rule,
        "among": list(selection.shares) if selection else [],
        "best": selection.best if selection else None,
        "estimated_share": share.value if share else None,
        "sure_share": selection.sure.get(size) if selection and size is not None else None,
        "metric": quality.metric.key if quality else None,
        "margin": quality.margin if quality else None,
        "candidates": quality.candidates if quality else [],
        "load": group.rates.load,
        "passes": group.rates.passes,
        "sizes": _rows(sizes, group),
        "claims": answer.claims,
        "lines": answer.lines,
    }


def _rows(sizes: pd.DataFrame, group: Group) -> list[dict[str, Any]]:
    """Return a dict for each size: its known numbers, and the reason if it has no rate."""
    rows = []
    for size, row in sizes.iterrows():
        numbers: dict[str, Any] = {str(name): float(value) for name, value in row.items() if math.isfinite(value)}
        numbers |= {name: int(numbers[name]) for name in ("runs", "seeds", "arrived") if name in numbers}
        reason = {} if RATE in numbers else {"reason": group.without_rate.get(int(str(size)), "")}
        rows.append({"batch_size": int(str(size)), **numbers, **reason})
    return rows


def read_answer(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of `answer.json` of a sweep's folder, or of a report's folder.

    Raises:
        UserError: if there is no such file, or it cannot be read.
    """
    paths = [Path(folder) / "report" / FILE, Path(folder) / FILE]
    path = next((path for path in paths if path.is_file()), paths[0])
    report_dir = path.absolute().parent
    advice = f"make the report again with {command_line([f'--out={relative(report_dir)}'])}"
    if report_dir.name == "report":  # of a sweep
        advice = f"{command_line(['batchscope', 'report', relative(report_dir.parent)])} writes it"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why(error)}; {advice}") from error
    except ValueError:
        content = None
    groups = content.get("groups") if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    if content is None or not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise UserError(f"{path}: holds no answer of this version; {advice}")
    return content
