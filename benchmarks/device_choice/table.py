"""The table of `benchmarks/choose.py`, at most 100 characters wide."""

from collections.abc import Mapping, Sequence
from typing import Any

_NAME = 24
_SHORT = {"elementwise": "elementw.", "layer_norm": "layernorm"}


def render(found: Mapping[str, Any]) -> str:
    """All tables, as plain text."""
    return "\n\n".join((_by_kind(found), _by_device(found), _ranking(found)))


def _by_kind(found: Mapping[str, Any]) -> str:
    head = ["operation", "cases", "error", "roof ratio", "best", "roofline", "80 % holds", "width"]
    rows = []
    for kind, one in [*found["by_kind"].items(), ("all", found["overall"])]:
        values = [one[key] for key in ("error", "roof_ratio_error", "roof_ratio_best_error", "roofline_error")]
        values += [one["coverage"], one["width"]]
        rows.append([kind, f"{one['cases']:,}", *map(_share, values)])
    notes = (
        "error: median of |predicted / measured - 1|\n"
        "roof ratio: another device's measurement of the same shape, times the ratio of the roofs\n"
        "best: the same by each target's best source, which is known in hindsight only\n"
        "width: median of (high - low) / middle"
    )
    return f"{_columns(head, rows)}\n{notes}"


def _by_device(found: Mapping[str, Any]) -> str:
    kinds = list(found["by_kind"])
    rows = []
    for device, one in found["by_device"].items():
        cells = [found["by_kind_and_device"][kind].get(device) for kind in kinds]
        rows.append([_cut(device), *map(_error_and_coverage, [*cells, one])])
    head = ["error (80 % holds)", *(_SHORT.get(kind, kind) for kind in kinds), "all"]
    return _columns(head, rows)


def _error_and_coverage(one: Mapping[str, Any] | None) -> str:
    return f"{one['error']:.0f} % ({one['coverage']:.0f})" if one else "-"


def _ranking(found: Mapping[str, Any]) -> str:
    whole = found["ranking"]
    if not whole["pairs"]:
        return "Order of two devices: no two that differ by over 20 % have the same operation."
    return (
        f"Order of two devices: {whole['pairs']:,} pairs of measurements of one operation differ by over 20 %.\n"
        f"Too close to call: {_share(whole['too_close'])}; of the others {_share(whole['right_of_called'])} are right."
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        first, *others = (
            cell.ljust(size) if not i else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others)))
    return "\n".join(lines)
