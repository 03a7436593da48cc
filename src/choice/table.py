"""The table of devices: a row each, for the terminal (with the columns that have room) and as Markdown."""

from collections.abc import Sequence

from ..records.terminal import columns as terminal_columns
from ..records.terminal import wrapped
from .rows import LeftOut, Question, Row
from .seconds import exactly
from .words import digits, time

_GAP = "  "
_LESS_USEFUL = ("energy", "samples/s", "limit", "memory", "an epoch")  # left out in this order where there is no room
_LEFT = ("device", "limit", "known")  # texts, which begin on the left
MEASURED_DIGITS = 3

_Column = tuple[str, list[str]]


def columns(rows: Sequence[Row], question: Question) -> list[_Column]:
    """Headings and cells; a column without a value is left out."""
    epochs = f"{question.epochs:,} epoch{'s' if question.epochs > 1 else ''}"
    found = [
        ("device", [f"{row.label} (here)" if row.here else row.label for row in rows]),
        ("batch", [f"{row.batch_size:,}" for row in rows]),
        ("samples/s", [_rate(row) for row in rows]),
        ("an epoch", [_time(row, row.epoch.middle, row.epoch.low) for row in rows]),
        (epochs, [time(row.training, row.is_bound) for row in rows]),
        ("cost", [_cost(row, question) for row in rows]),
        ("energy", ["" if row.joules is None else f"≤ {digits(row.joules / 3600)} Wh" for row in rows]),
        ("memory", [_memory(row) for row in rows]),
        ("limit", [row.step.limit for row in rows]),
        ("known", [row.step.how for row in rows]),
    ]
    return [(heading, cells) for heading, cells in found if any(cells)]


def to_text(rows: Sequence[Row], question: Question, width: int | None = None) -> list[str]:
    """The lines of the table in so many columns, those of the terminal by default; then what was left out."""
    width = width or terminal_columns()
    shown, left_out = columns(rows, question), []
    if _width(shown) > width:
        shown[-1] = "known", [row.how for row in rows]
    for heading in _LESS_USEFUL:
        if _width(shown) <= width:
            break
        left_out += [name for name, _ in shown if name == heading]
        shown = [column for column in shown if column[0] != heading]
    blocks = []
    for heading, cells in shown:
        room = max(map(len, [heading, *cells]))
        left = heading in _LEFT
        blocks.append([text.ljust(room) if left else text.rjust(room) for text in (heading, *cells)])
    lines = [_GAP.join(line).rstrip() for line in zip(*blocks, strict=True)]
    if left_out:
        lines += wrapped([f"(without {', '.join(left_out)}: a wider terminal, --out and --json have them)"], width)
    return lines


def to_markdown(rows: Sequence[Row], question: Question) -> list[str]:
    """The lines of the whole table."""
    shown = columns(rows, question)
    marks = ["---" if heading in _LEFT else "---:" for heading, _ in shown]
    cells = zip(*(cells for _, cells in shown), strict=True)
    return [f"| {' | '.join(line)} |" for line in ([heading for heading, _ in shown], marks, *cells)]


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """A line for each reason for which devices have no row."""
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        reasons.setdefault(one.reason, []).append(one.label)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _width(shown: Sequence[_Column]) -> int:
    return sum(max(map(len, [heading, *cells])) for heading, cells in shown) + len(_GAP) * (len(shown) - 1)


def _count(row: Row) -> int:
    return MEASURED_DIGITS if row.how == "measured" else 2


def _rate(row: Row) -> str:
    rate = row.samples_per_sec
    return f"≤ {digits(rate.high)}" if row.is_bound else digits(rate.middle, _count(row))


def _time(row: Row, middle: float, low: float) -> str:
    return time(exactly(low if row.is_bound else middle), row.is_bound, count=_count(row))


def _cost(row: Row, question: Question) -> str:
    if row.cost is None:
        return "–" if question.prices.per_hour and row.here else ""
    low, high = (question.prices.text(end) for end in (row.cost.low, row.cost.high))
    return f"≥ {low}" if row.is_bound else low if low == high else f"{low}–{high}"


def _memory(row: Row) -> str:
    """What a step needs, of what there is."""
    needed, there = row.step.memory_bytes.middle, f"{row.device.memory_bytes / 2**30:.3g} GiB"
    if needed < 0.1 * 2**30 or not row.device.memory_bytes:
        needs = f"{digits(needed / 2**20)} MiB"
        return f"{needs} of {there}" if row.device.memory_bytes else needs
    return f"{digits(needed / 2**30)} of {there}"
