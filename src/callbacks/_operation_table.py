"""The tables of an explanation: the step by module, the costliest operations, and where no kernel ran."""

import shutil
import textwrap
from collections.abc import Sequence

from ..hardware.evidence import limit_line
from ..records.explanation import Cost, Explanation
from ..records.formatting import count, duration, percent, with_prefix
from ..records.step_parts import PARTS, SHORT_NAMES

MOST_MODULES = 24  # rows; with more, modules are shown with what they contain
_LONGEST = 40  # characters of a module's path
_WITHOUT_TERMINAL = 140  # columns
_NARROW = 100  # columns; below, the parts of a step have their short names
_LESS_USEFUL = ("bytes", "from memory", "calls", "FLOPs")  # left out in this order where the terminal is too narrow


def as_text(step: Explanation, depth: int | None = None, width: int | None = None) -> str:
    """All that an explanation says, for a terminal.

    Args:
        step: the explanation.
        depth: show modules to this depth, with what they contain.
        width: columns; None for those of the terminal.
    """
    width = width or shutil.get_terminal_size((_WITHOUT_TERMINAL, 24)).columns
    blocks = [_wrapped(_heading(step), width, indent=2)]
    if step.operations:
        blocks += [_modules(step, depth, width), _costliest(step, width)]
    if step.gaps:
        blocks.append(_gaps(step, width))
    blocks.append(_wrapped([f"note     {note}" for note in step.notes], width, indent=9))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _wrapped(lines: Sequence[str], width: int, indent: int) -> list[str]:
    """Lines of text in at most so many columns. A word that is longer stays whole."""
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [part for line in lines for part in wrapper.wrap(line)]


def _heading(step: Explanation) -> list[str]:
    batch = f", batches of {step.batch_size:,}" if step.batch_size else ""
    threads = f", {count(step.threads, 'thread')}" if step.threads else ""
    lines = [f"{step.title}{batch}, {step.precision}, on {step.device} ({step.device_name}{threads})"]
    took = (
        f"a step takes {duration(step.step_seconds)} ({'median' if step.device == 'cpu' else 'mean'} of {step.steps})"
    )
    least = step.total.floor_seconds
    bound = f"; its lower bound here is {duration(least)}, {percent(least / step.step_seconds)} of it" if least else ""
    lines.append(took + bound)
    if step.bottleneck:
        lines.append(limit_line(step.bottleneck))
    if step.idle_share is not None:
        lines.append(f"no kernel runs in {percent(step.idle_share)} of a step")
    return lines


def _modules(step: Explanation, depth: int | None, width: int) -> list[str]:
    rows = [["module", *_HEADINGS]]
    for cost in step.modules(depth, MOST_MODULES):
        rows.append([cost.module, *_cells(cost, step)])
    if step.is_timed:
        if step.device == "cpu":
            rows.append(_time_row("waiting for data", step.waiting_seconds, step))
            rows.append(_time_row("between batches", step.between_seconds - step.waiting_seconds, step))
            rows.append(_time_row(_HOST, step.outside_seconds, step))
        elif step.idle_share is not None:
            rows.append(_time_row("no kernel runs", step.idle_share * step.step_seconds, step))
    total = step.total
    rows.append(["the step", *_cells(total, step)])
    if step.is_timed:
        floor = total.floor_seconds / step.step_seconds if total.floor_seconds else None
        rows[-1][1:3] = [percent(1), duration(step.step_seconds)]
        rows[-1][-1] = _of_floor(floor)
    return aligned(_fitted(rows, 0, width, least=len(_HOST)))


_HOST = "host: Python, autograd"
_HEADINGS = ["share", "time", "calls", "FLOPs", "bytes", "from memory", "bound/time"]


def _cells(cost: Cost, step: Explanation) -> list[str]:
    timed = step.is_timed
    return [
        percent(cost.seconds / step.step_seconds) if timed else "",
        duration(cost.seconds) if timed else "",
        f"{cost.calls:,.0f}" if cost.calls else "–",
        with_prefix(cost.flops) if cost.flops else "–",
        with_prefix(cost.bytes, "B") if cost.bytes else "–",
        with_prefix(cost.cold_bytes, "B") if cost.cold_bytes else "–",
        _of_floor(cost.of_floor),
    ]


def _of_floor(share: float | None) -> str:
    return "–" if share is None else percent(share, 0 if share >= 0.1 else 1)


def _time_row(name: str, seconds: float, step: Explanation) -> list[str]:
    return [name, percent(seconds / step.step_seconds), duration(seconds), *["–"] * 5]


def _costliest(step: Explanation, width: int) -> list[str]:
    rows = [["costliest operations", "module", "part", *_HEADINGS]]
    for cost in step.costliest():
        name = _shortened(cost.name.removeprefix("aten."), max(len(rows[0][0]), width // 4))
        part = _SHORT.get(cost.part, cost.part) if width < _NARROW else cost.part
        rows.append([name, cost.place, part, *_cells(cost, step)])
    return aligned(_fitted(rows, 1, width, least=14), texts=3)


_SHORT = dict(zip(PARTS, SHORT_NAMES, strict=True))


def _gaps(step: Explanation, width: int) -> list[str]:
    rows = [["no kernel runs after", "until", "a step", "times", "longest"]]
    for gap in step.gaps:
        times = [duration(gap.seconds), f"{gap.calls:.3g}", duration(gap.longest_seconds)]
        names = (_shortened(name.removeprefix("aten."), (width - 30) // 2) for name in (gap.after, gap.before))
        rows.append([*names, *times])
    return aligned(rows, texts=2)


def _fitted(rows: list[list[str]], at: int, width: int, least: int) -> list[list[str]]:
    """The rows in at most so many columns: less useful ones are left out until the text has room, then it is cut.

    Args:
        rows: of a table, with its headings.
        at: the place of the text that may be cut.
        width: of the terminal.
        least: characters that this text keeps.
    """
    rows = _without_empty(rows)
    for name in ("", *_LESS_USEFUL):
        rows = [[cell for cell, heading in zip(row, rows[0], strict=True) if heading != name] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        room = width - sum(widths) + widths[at] - 2 * (len(widths) - 1)
        if room >= min(widths[at], least):
            break
    most = min(max(room, 8), _LONGEST)
    return [[*row[:at], _shortened(row[at], most), *row[at + 1 :]] for row in rows]


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _without_empty(rows: list[list[str]]) -> list[list[str]]:
    """The rows without the columns that say nothing."""
    keep = [any(row[at] not in ("", "–") for row in rows[1:]) for at in range(len(rows[0]))]
    return [[cell for cell, kept in zip(row, keep, strict=True) if kept] for row in rows]


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Columns as wide as they need to be: the first ones, texts, to the left, and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [
            cell.ljust(width) if at < texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(line).rstrip() for line in lines]
