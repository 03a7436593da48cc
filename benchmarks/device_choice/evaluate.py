"""Hold predictions against measurements: errors, intervals, and ranking."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from batchscope.choice.interval import CALLED_FROM, Interval, exactly, probability_shorter
from device_choice.cases import Case, Evaluation

DIFFERENT = 1.2  # the ratio of two measurements from which on their order counts
Facts = dict[str, Any]


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
    """Everything that the JSON line has of predictions; see `benchmarks/choose.py`."""
    cases = evaluation.cases

    def by(key: Callable[[Case], str], own: Sequence[Case] = cases) -> Facts:
        return {name: summary(part) for name, part in grouped(own, key).items()}

    def device(case: Case) -> str:
        return case.card

    def kind(case: Case) -> str:
        return case.work.kind

    def operation(case: Case) -> str:
        return case.work.name

    return {
        "overall": summary(cases),
        "by_kind": by(kind),
        "by_operation": by(operation),
        "by_device": by(device),
        "by_kind_and_device": {name: by(device, own) for name, own in grouped(cases, kind).items()},
        "by_operation_and_device": {name: by(device, own) for name, own in grouped(cases, operation).items()},
        "ranking": ranking(evaluation),
    }
