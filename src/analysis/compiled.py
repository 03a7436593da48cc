"""What `compile` gained or cost, for the settings that ran both with it and without."""

import json
import statistics
from collections.abc import Sequence

from ..records.formatting import count, duration, option_value, percent
from .groups import label
from .recommend import ratio
from .run import BATCH_SIZE, SEED, Run

_OPTION = "compile"
_SAME = 0.02  # a smaller difference is none


def gains(runs: Sequence[Run], varied: Sequence[str]) -> list[str]:
    """A line for each setting and each mode of torch.compile that ran beside a run without it."""
    if _OPTION not in varied:
        return []
    keys = [key for key in varied if key not in (_OPTION, SEED)]
    settings: dict[str, list[Run]] = {}
    for run in runs:
        if "step_ms_median" in run.values:
            settings.setdefault(json.dumps([run.settings.get(key) for key in keys], default=str), []).append(run)
    return [line for members in settings.values() for line in _of_setting(members, keys)]


def _of_setting(runs: list[Run], keys: list[str]) -> list[str]:
    by_mode: dict[str, list[Run]] = {}
    for run in runs:
        by_mode.setdefault(option_value(run.settings.get(_OPTION, False)), []).append(run)
    plain = by_mode.pop("false", [])
    name = label(runs[0], [key for key in keys if key != BATCH_SIZE])
    at = f" at batch size {runs[0].batch_size:,}" if runs[0].batch_size else ""
    return [f"{name}{at}: {_gain(mode, members, plain)}" for mode, members in by_mode.items() if plain]


def _gain(mode: str, compiled: list[Run], plain: list[Run]) -> str:
    with_it, without = (statistics.median(run.values["step_ms_median"] for run in runs) for runs in (compiled, plain))
    seconds = statistics.median(run.values.get("compile_seconds", 0.0) for run in compiled)
    took = f"compiling took {duration(seconds)}"
    if abs(without / with_it - 1) < _SAME:
        return f"compile={mode} changes the rate by less than {percent(_SAME)}; {took}."
    words = f"compile={mode} is {ratio(1 / with_it, 1 / without)}; {took}"
    if with_it > without:
        return f"{words}."
    return f"{words}, as long as {count(round(1e3 * seconds / (without - with_it)), 'shorter step')} save."
