"""The tables of an explanation: the step by module, the costliest operations, and where no kernel ran."""

from collections.abc import Sequence

from ..records.explanation import OWN_CODE, Cost, Explanation
from ..records.formatting import count, duration, percent, with_prefix

MOST_MODULES = 24  # rows; with more, modules are shown with what they contain
_LONGEST = 40  # characters of a module's path


def as_text(step: Explanation, depth: int | None = None) -> str:
    """All that an explanation says, for a terminal; `depth` shows modules with what they contain."""
    blocks = [_heading(step)]
    if step.operations:
        blocks += [_modules(step, depth), _costliest(step)]
    if step.gaps:
        blocks.append(_gaps(step))
    blocks.append([f"note     {note}" for note in step.notes])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _heading(step: Explanation) -> list[str]:
    batch = f", batches of {step.batch_size:,}" if step.batch_size else ""
    threads = f", {count(step.threads, 'thread')}" if step.threads else ""
    lines = [f"{step.title}{batch}, {step.precision}, on {step.device} ({step.device_name}{threads})"]
    took = (
        f"a step takes {duration(step.step_seconds)} ({'median' if step.device == 'cpu' else 'mean'} of {step.steps})"
    )
    floor = step.total.floor_seconds
    lines.append(
        f"{took}; its floor here is {duration(floor)}, {percent(floor / step.step_seconds)} of it" if floor else took
    )
    if found := step.bottleneck:
        certainty = "" if found["certainty"] == "clear" else f"{found['certainty']} "
        lines.append(f"{certainty}bottleneck: {found['kind']}: {found['evidence']}")
    if step.idle_share is not None:
        lines.append(f"no kernel runs in {percent(step.idle_share)} of a step")
    return lines


def _modules(step: Explanation, depth: int | None) -> list[str]:
    rows = [["module", *_HEADINGS]]
    for cost in step.modules(depth, MOST_MODULES):
        rows.append([_shortened(cost.module), *_cells(cost, step)])
    if step.is_timed:
        if step.device == "cpu":
            rows.append(_time_row("waiting for data", step.waiting_seconds, step))
            rows.append(_time_row("between batches", step.between_seconds - step.waiting_seconds, step))
            rows.append(_time_row("host: Python, autograd", step.outside_seconds, step))
        elif step.idle_share is not None:
            rows.append(_time_row("no kernel runs", step.idle_share * step.step_seconds, step))
    total = step.total
    rows.append(["the step", *_cells(total, step)])
    if step.is_timed:
        floor = total.floor_seconds / step.step_seconds if total.floor_seconds else None
        rows[-1][1:3] = [percent(1), duration(step.step_seconds)]
        rows[-1][-1] = _of_floor(floor)
    return aligned(_without_empty(rows))


_HEADINGS = ["share", "time", "calls", "FLOPs", "bytes", "from memory", "floor/time"]


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


def _costliest(step: Explanation) -> list[str]:
    rows = [["costliest operations", "module", "part", *_HEADINGS]]
    for cost in step.costliest():
        module = _shortened(cost.module) or OWN_CODE
        rows.append([cost.name.removeprefix("aten."), module, cost.part, *_cells(cost, step)])
    return aligned(_without_empty(rows), texts=3)


def _gaps(step: Explanation) -> list[str]:
    rows = [["no kernel runs after", "until", "a step", "times", "longest"]]
    for gap in step.gaps:
        times = [duration(gap.seconds), f"{gap.calls:.3g}", duration(gap.longest_seconds)]
        rows.append([gap.after.removeprefix("aten."), gap.before.removeprefix("aten."), *times])
    return aligned(rows, texts=2)


def _shortened(path: str) -> str:
    return path if len(path) <= _LONGEST else f"…{path[1 - _LONGEST :]}"


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
