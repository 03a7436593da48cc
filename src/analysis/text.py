"""What a report prints: a block for each group of runs with the sizes as columns, or a table of settings."""

import math
import shlex
from collections.abc import Sequence

from ..errors import printable
from ..records.formatting import significant
from ..records.metrics import FRACTION, metric
from ..records.terminal import wrapped
from .answer import Answer
from .groups import Group, SweepResults
from .run import BATCH_SIZE, Run
from .settings import mean_and_deviation, name_of
from .table import reach_text
from .text_table import aligned, page_width, size_blocks

_LONGEST = 60  # characters of a reason
_Row = tuple[str, list[str]]


def group_block(group: Group, answer: Answer | None, metrics: Sequence[str]) -> list[str]:
    """The rates of a group at its sizes, and the answer."""
    lines = size_blocks(group.label, list(group.sizes), _rows(group, answer, metrics))
    for number, line in enumerate(answer.lines if answer else []):
        lines += wrapped([("→ " if number == 0 else "  ") + line], page_width())
    if answer and answer.repeat:
        lines.append(f"  repeat   {repeat_command(answer)}")
    return lines


def _rows(group: Group, answer: Answer | None, metrics: Sequence[str]) -> list[_Row]:
    sizes, rates = list(group.sizes), group.rates
    vague = answer.vague if answer else [size for size in sizes if not math.isfinite(rates.reach(size))]
    marks = {size: "?" if size in vague else " " if vague else "" for size in sizes}
    reach = {size: rates.reach(size) for size in sizes}
    rows = [
        ("samples/s", [f"{significant(rates.rate(size))}{marks[size]}" for size in sizes]),
        ("±", [(_tight(reach_text(reach[size])) or "?") + (" " if vague else "") for size in sizes]),
    ]
    found = [("MFU", "mfu")]
    if group.device != "cpu":
        found += [("busy", "utilization_pct"), ("memory GiB", "memory_peak_gib")]
    for heading, name in found:
        known = group.medians(name)
        rows.append((heading, [_cell(name, known.get(size)) + (" " if vague else "") for size in sizes]))
    for key in metrics[:1]:
        values = {size: [r.metrics[key] for r in runs if key in r.metrics] for size, runs in group.sizes.items()}
        cells = [_tight(mean_and_deviation(key, v)) if (v := values[size]) else "" for size in sizes]
        rows.append((key, [cell + (" " if vague else "") for cell in cells]))
    return [(name, cells) for name, cells in rows if any(cell.strip() for cell in cells)]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if metric(name).unit == FRACTION:
        return f"{100 * value:.1f}%" if value < 0.0995 else f"{100 * value:.0f}%"
    return f"{value:.0f}%" if name.endswith("_pct") else significant(value)


def _tight(text: str) -> str:
    return text.replace(" %", "%").replace(" ± ", "±")


def settings_table(sweep: SweepResults, metrics: Sequence[str]) -> list[str]:
    """A line for each group of a sweep in which each group ran at one batch size; empty where nothing was measured."""
    lines = []
    for group in sweep.groups:
        size = next(iter(group.sizes), None)
        rate = group.rates.rate(size) if size is not None else None
        reach = group.rates.reach(size) if size is not None else math.inf
        values = {key: [run.metrics[key] for run in group.runs if key in run.metrics] for key in metrics[:2]}
        if rate is None and not any(values.values()):
            continue
        mfu = _cell("mfu", group.medians("mfu").get(size or 0))
        numbers = ["" if rate is None else significant(rate), _tight(reach_text(reach)), mfu]
        numbers += [mean_and_deviation(key, found) if found else "" for key, found in values.items()]
        lines.append([name_of(group, sweep), str(len(group.runs)), *numbers])
    if not lines:
        return []
    columns = list(zip(["setting", "runs", "samples/s", "±", "MFU", *metrics[:2]], *lines, strict=True))
    return aligned(list(zip(*(column for column in columns if any(column[1:])), strict=True)))


def failures(sweep: SweepResults) -> list[str]:
    """Which runs did not finish, and why: `1,024: out of memory`."""
    reasons: dict[str, list[str]] = {}
    for group in sweep.groups:
        for run in (run for run in group.runs if run.reason):
            reason = run.reason if len(run.reason) <= _LONGEST else f"{run.reason[: _LONGEST - 2]} …"
            reasons.setdefault(reason, []).append(_name(run, group, sweep))
    found = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
    return wrapped([f"failed   {'; '.join(found)}"], page_width()) if found else []


def _name(run: Run, group: Group, sweep: SweepResults) -> str:
    size = f"{run.batch_size:,}" if BATCH_SIZE in sweep.varied and run.batch_size else ""
    label = group.label if len(sweep.groups) > 1 else ""
    return " · ".join(filter(None, (label, size))) or f"run {run.name}"


def repeat_command(answer: Answer) -> str:
    """The command line of the sweep, with what is to be repeated in place of its own options."""
    from ..options.command_lines import program  # which imports Hydra, and few reports need it

    run = next(iter(answer.group.runs))
    given = run.record.get("overrides")
    own = [word for word in given if isinstance(word, str)] if isinstance(given, list) else []
    replaced = {_option(word) for word in answer.repeat}
    kept = [word for word in own if _option(word) not in replaced]
    return printable(" ".join([*program(), "-m", *(_quoted(word) for word in (*kept, *answer.repeat))]))


def _option(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _quoted(word: str) -> str:
    return shlex.quote(" ".join(word.split()))
