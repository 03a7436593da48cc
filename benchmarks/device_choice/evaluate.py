"""Hold predictions against measurements: errors, intervals, the order of two devices; and the table of it."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fit import Fit
from measurements import Measurements

from batchscope.choice.interval import CALLED_FROM, Interval, exactly, probability_shorter
from batchscope.choice.kernels import Coefficients, predict, roof_seconds
from batchscope.choice.work import Work
from batchscope.hardware.datasheet import Datasheet

DIFFERENT = 1.2  # the ratio of two measurements from which on their order counts
Facts = dict[str, Any]
Shape = tuple[str, tuple[int, ...]]
Row = tuple[Work, Datasheet, float]


@dataclass(frozen=True)
class Case:
    """One measured operation on a card, and its prediction by coefficients that have not seen the card."""

    work: Work
    card: str
    seconds: float
    predicted: Interval
    roof: float
    from_others: Mapping[str, float]  # by card: its measurement of the same shape times the ratio of the roofs

    @property
    def shape(self) -> Shape:
        return self.work.name, self.work.dims


@dataclass(frozen=True)
class Evaluation:
    cases: list[Case]
    known: dict[Shape, dict[str, float]]  # measured on cards that were fitted, where others are tested


def evaluate(fitted: Measurements, tested: Measurements | None) -> Evaluation:
    """Predict every measurement of `tested`; without it, each card of `fitted` from its others."""
    fit, names = Fit(fitted), fitted.measured_devices()
    by_shape: dict[Shape, list[Row]] = defaultdict(list)
    for row in fitted.rows:
        by_shape[row[0].name, row[0].dims].append(row)
    cases: list[Case] = []
    for name in (tested or fitted).measured_devices():
        of = fit.coefficients(names if tested else [other for other in names if other != name])
        rows = [row for row in (tested or fitted).rows if row[1].names[0] == name]
        cases += _cases(rows, by_shape, of)
    known = {shape: {row[1].names[0]: row[2] for row in rows} for shape, rows in by_shape.items()} if tested else {}
    return Evaluation(cases, known)


def _cases(rows: Sequence[Row], by_shape: Mapping[Shape, list[Row]], of: Coefficients) -> list[Case]:
    """The measurements of one card."""
    card = rows[0][1]
    predicted = predict([work for work, _, _ in rows], card, of).T.tolist()
    found = []
    for (work, _, seconds), ends in zip(rows, predicted, strict=True):
        roof, ratios = roof_seconds(work, card), {}
        for _, other, there in by_shape.get((work.name, work.dims), ()):
            if other.names[0] != card.names[0]:
                ratios[other.names[0]] = there * roof / roof_seconds(work, other)
        found.append(Case(work, card.names[0], seconds, Interval(*ends), roof, ratios))
    return found


def error(predicted: Iterable[float], measured: Iterable[float]) -> float | None:
    """The median of the absolute errors, in percent of the measurement; None without cases."""
    found = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return percent(float(np.median(found))) if found else None


def percent(share: float) -> float:
    return round(100 * share, 1)


def summary(cases: Sequence[Case]) -> Facts:
    """Errors, coverage and width in percent."""
    naive = [(ratio, case.seconds) for case in cases for ratio in case.from_others.values()]
    return {
        "cases": len(cases),
        "error": error((case.predicted.middle for case in cases), (case.seconds for case in cases)),
        "coverage": percent(sum(holds(case.predicted, case.seconds) for case in cases) / len(cases)),
        "width": percent(float(np.median([width(case.predicted) for case in cases]))),
        "bias": percent(math.exp(float(np.median([math.log(c.predicted.middle / c.seconds) for c in cases]))) - 1),
        "roofline_error": error((case.roof for case in cases), (case.seconds for case in cases)),
        "roof_ratio_error": error(*zip(*naive, strict=True)) if naive else None,
        "roof_ratio_best_error": _best_source(cases),
    }


def _best_source(cases: Sequence[Case]) -> float | None:
    """The roof ratio with each target's best source by kind, which only hindsight knows."""
    found: list[float] = []
    for own in grouped(cases, lambda case: (case.work.kind, case.card)).values():
        by_source: dict[str, list[float]] = defaultdict(list)
        for case in own:
            for source, ratio in case.from_others.items():
                by_source[source].append(abs(ratio / case.seconds - 1))
        if by_source:
            found += min(by_source.values(), key=np.median)
    return percent(float(np.median(found))) if found else None


def holds(interval: Interval, seconds: float) -> bool:
    return interval.low <= seconds <= interval.high


def width(interval: Interval) -> float:
    return (interval.high - interval.low) / interval.middle


def grouped(cases: Iterable[Case], key: Callable[[Case], Any]) -> dict[Any, list[Case]]:
    found: dict[Any, list[Case]] = defaultdict(list)
    for case in cases:
        found[key(case)].append(case)
    return dict(sorted(found.items()))


def ranking(evaluation: Evaluation) -> Facts:
    """How often the order of two devices is right, for the same operation, where their measurements differ by over 20 %.

    Both times are predicted. In a test, a tested device is also compared with the measurements of the fitted ones.
    """
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("right", "wrong", "too_close"), 0))
    for shape, cases in grouped(evaluation.cases, lambda case: case.shape).items():
        times = [(case.card, case.seconds, case.predicted, True) for case in cases]
        tested = {name for name, *_ in times}
        measured = evaluation.known.get(shape, {}).items()
        times += [(name, seconds, exactly(seconds), False) for name, seconds in measured if name not in tested]
        for first, second in itertools.combinations(times, 2):
            if not (first[3] or second[3]) or _ratio(first[1], second[1]) <= DIFFERENT:
                continue
            sure = probability_shorter(first[2], second[2])
            called = max(sure, 1 - sure) >= CALLED_FROM
            right = (sure > 0.5) == (first[1] < second[1])
            outcome = "too_close" if not called else "right" if right else "wrong"
            for key in ("", f"kind {cases[0].work.kind}", f"pair {' | '.join(sorted((first[0], second[0])))}"):
                counts[key][outcome] += 1
    whole = _shares(counts.pop("", dict.fromkeys(("right", "wrong", "too_close"), 0)))
    for title, prefix in (("by_kind", "kind "), ("by_device_pair", "pair ")):
        named = {
            key.removeprefix(prefix): _shares(count) for key, count in sorted(counts.items()) if key.startswith(prefix)
        }
        whole[title] = named
    return whole


def _ratio(first: float, second: float) -> float:
    return max(first, second) / min(first, second)


def _shares(count: Mapping[str, int]) -> Facts:
    pairs, called = sum(count.values()), count["right"] + count["wrong"]
    return {
        "pairs": pairs,
        "too_close": percent(count["too_close"] / pairs) if pairs else None,
        "right_of_called": percent(count["right"] / called) if called else None,
        "wrong_of_all": percent(count["wrong"] / pairs) if pairs else None,
    }


def results(evaluation: Evaluation) -> Facts:
    """Everything that the JSON line has of predictions."""
    by = {
        "kind": lambda case: case.work.kind,
        "operation": lambda case: case.work.name,
        "device": lambda case: case.card,
    }
    found: Facts = {"overall": summary(evaluation.cases)}
    for name, key in by.items():
        found[f"by_{name}"] = {each: summary(own) for each, own in grouped(evaluation.cases, key).items()}
    for name in ("kind", "operation"):
        groups = grouped(evaluation.cases, by[name]).items()
        found[f"by_{name}_and_device"] = {
            each: {card: summary(cases) for card, cases in grouped(own, by["device"]).items()} for each, own in groups
        }
    return found | {"ranking": ranking(evaluation)}


_NAME = 24  # characters of a device
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
