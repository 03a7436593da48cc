"""Hold predictions against measurements: errors, intervals, ranking, and what ten measurements of the target bring."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from batchscope.choice.kernels import Coefficients, correction, ends, floor_seconds, kernel_family
from batchscope.choice.roofs import Array
from batchscope.choice.seconds import CALLED_FROM, Interval, exactly, probability_shorter
from device_choice.cases import Case, Evaluation

DIFFERENT = 1.2  # the ratio of two measurements from which on their order counts
TEN, DRAWS = 10, 21
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
    for own in grouped(cases, lambda case: (case.work.kind, case.device.name)).values():
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


def with_measurements(evaluation: Evaluation, kinds: bool) -> Facts:
    """Errors once ten measurements of the target are known, drawn at random: of the same kind, or of any (`kinds` False).

    The measurements that were drawn are not judged. Of several draws, the median.
    """
    found: dict[str, Facts] = {}
    names = grouped(evaluation.cases, lambda case: case.device.name)
    drawn: dict[str, list[list[list[Array]]]] = defaultdict(list)
    for name, cases in names.items():
        for kind, own in grouped(cases, lambda case: case.work.kind).items():
            pool, of, arrays = own if kinds else cases, evaluation.coefficients[name], _arrays(own)
            draws = [_draw(own, arrays, pool, of, seed) for seed in range(DRAWS)]
            if all(draws):
                found.setdefault(kind, {"by_device": {}})["by_device"][name] = _medians(draws)
                drawn[kind].append(draws)
    for kind, devices in drawn.items():
        pooled = [[np.concatenate(parts) for parts in zip(*same, strict=True)] for same in zip(*devices, strict=True)]
        found[kind] = _medians(pooled) | found[kind]
    return dict(sorted(found.items()))


def _draw(
    judged: Sequence[Case], arrays: Array, pool: Sequence[Case], of: Coefficients, seed: int
) -> list[Array] | None:
    """Absolute errors, whether the interval holds, and widths of what is not drawn."""
    if len(pool) <= TEN:
        return None
    picked = np.random.default_rng(seed).choice(len(pool), TEN, replace=False)
    known = {id(pool[index]) for index in picked}
    others = np.array([id(case) not in known for case in judged])
    if not others.any():
        return None
    residuals: dict[Any, list[float]] = defaultdict(list)
    for index in picked:
        case = pool[index]
        residuals[kernel_family(case.work)].append(math.log(case.seconds / case.predicted.middle))
    first = judged[0]
    shift, spread = correction(kernel_family(first.work), residuals, first.device, of)
    spread = math.hypot(spread, of.kernel_spread[first.work.kind])
    middle, seconds, floor = arrays[:, others]
    middle = middle * math.exp(shift)
    low, high = ends(middle, spread, floor)
    return [np.abs(middle / seconds - 1), (low <= seconds) & (seconds <= high), (high - low) / middle]


def _arrays(cases: Sequence[Case]) -> Array:
    """Middles, measurements and floors."""
    return np.array([(case.predicted.middle, case.seconds, floor_seconds(case.work, case.device)) for case in cases]).T


def _medians(draws: Iterable[Any]) -> Facts:
    each = [(np.median(errors), np.mean(held), np.median(widths)) for errors, held, widths in draws]
    medians = np.median(np.array(each), axis=0)
    return dict(zip(("error", "coverage", "width"), (percent(float(value)) for value in medians), strict=True))


def ranking(evaluation: Evaluation) -> Facts:
    """How often the order of two devices is right, for the same operation, where their measurements differ by over 20 %.

    Both times are predicted. In a test, a tested device is also compared with the measurements of the fitted ones.
    """
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("right", "wrong", "too_close"), 0))
    for shape, cases in grouped(evaluation.cases, lambda case: case.shape).items():
        times = [(case.device.name, case.seconds, case.predicted, True) for case in cases]
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


def device_pairs(evaluation: Evaluation) -> Facts:
    """By source and target: the target predicted from the source's measurement of the same operation."""
    pairs: dict[str, dict[str, list[tuple[Case, str]]]] = defaultdict(lambda: defaultdict(list))
    for case in evaluation.cases:
        for source in case.by_model:
            pairs[f"{source} -> {case.device.name}"][case.work.kind].append((case, source))
    return {
        pair: {kind: _pair_summary(found) for kind, found in sorted(kinds.items())}
        for pair, kinds in sorted(pairs.items())
    }


def _pair_summary(found: Sequence[tuple[Case, str]]) -> Facts:
    measured = [case.seconds for case, _ in found]
    held = 0
    for case, source in found:
        factor = case.by_model[source] / case.predicted.middle
        held += holds(case.predicted * factor, case.seconds)
    return {
        "cases": len(found),
        "error": error((case.by_model[source] for case, source in found), measured),
        "coverage": percent(held / len(found)),
        "roof_ratio_error": error((case.from_others[source] for case, source in found), measured),
    }


def results(evaluation: Evaluation) -> Facts:
    """Everything that the JSON line has of predictions; see `benchmarks/choose.py`."""
    cases = evaluation.cases

    def by(key: Callable[[Case], str], own: Sequence[Case] = cases) -> Facts:
        return {name: summary(part) for name, part in grouped(own, key).items()}

    def device(case: Case) -> str:
        return case.device.name

    def kind(case: Case) -> str:
        return case.work.kind

    def operation(case: Case) -> str:
        return case.work.name

    return {
        "overall": summary(cases) if cases else None,
        "by_kind": by(kind),
        "by_operation": by(operation),
        "by_device": by(device),
        "by_kind_and_device": {name: by(device, own) for name, own in grouped(cases, kind).items()},
        "by_operation_and_device": {name: by(device, own) for name, own in grouped(cases, operation).items()},
        "with_ten_of_the_kind": with_measurements(evaluation, kinds=True),
        "with_ten_of_any_kind": with_measurements(evaluation, kinds=False),
        "by_device_pair": device_pairs(evaluation),
        "ranking": ranking(evaluation),
        "bounds": {
            name: {"cases": len(own), "hold": percent(sum(case.seconds >= case.roof for case in own) / len(own))}
            for name, own in grouped(evaluation.bounds, device).items()
        },
    }
