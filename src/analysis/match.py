"""Which runs of a folder are compared with those of another one, and what differs between the two."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import UserError
from ..options.purpose import PLACES, purpose_of
from ..options.tree import flatten
from ..records.formatting import option_value
from ..records.rates import why_no_rate
from ..records.values import table
from .groups import SweepResults
from .run import SEED, Run

_SAID = {"seed", "data.seed", "search", "resume", "run_dir"}  # a difference says nothing, or is said elsewhere
_RECORDED = {"versions": "versions", "hardware": "hardware", "data": "dataset", "model": "model"}
_MAY_DIFFER = (SEED, "device_name")  # between the repeats of a side
_LONGEST = 60  # characters of a value


def measured(name: str, side: SweepResults) -> tuple[list[Run], list[str]]:
    """The measured runs of side `A` or `B`, which repeat one another, and a line on each that was not measured.

    Raises:
        UserError: if runs of the side differ in more than the seed, or none was measured.
    """
    if several := [key for key in side.factors if key not in _MAY_DIFFER]:
        raise UserError(
            f"compare: {name} holds runs that differ in {', '.join(several)}; takes one run, or its repeats"
        )
    lines = [f"{name}, {run.name}: not measured ({_why(run)})" for run in side.runs if not run.samples_a_step]
    runs = [run for run in side.runs if run.samples_a_step]
    if not runs:
        raise UserError(f"compare: {'; '.join(lines[:4])}")
    return runs, lines


def _why(run: Run) -> str:
    return run.reason or why_no_rate(run.record)


def differences(a: Run, b: Run) -> dict[str, list[str]]:
    """What differs between two runs, by where the records say so; places without a difference are left out."""
    found = {"configuration": [*_differing(a, b, _configuration)]}
    for place, key in _RECORDED.items():
        found[place] = [*_differing(a, b, lambda run, key=key: table(run.record.get(key)))]
    return {place: lines for place, lines in found.items() if lines}


def _configuration(run: Run) -> dict[str, Any]:
    """All options but folders: also those of callbacks and loggers, which take time."""
    config = table(run.record.get("config"))
    here = str(config.get("run_dir") or run.folder)
    return {
        key: value
        for key, value in flatten(config)
        if not {key, key.partition(".")[0]} & _SAID
        and purpose_of(key, config) not in PLACES
        and not (isinstance(value, str) and here in value)
    }


def _differing(a: Run, b: Run, read: Callable[[Run], Mapping[str, Any]]) -> Iterator[str]:
    """A line for each key: `lr: 0.1 → 0.2`."""
    before, after = read(a), read(b)
    for key in dict.fromkeys([*before, *after]):
        if (key in before) != (key in after) or before[key] != after[key]:
            yield f"{key}: {' → '.join(_shown(side[key]) if key in side else '—' for side in (before, after))}"


def _shown(value: Any) -> str:
    """A value, all its digits; of a long text its begin and its end."""
    text = repr(value) if isinstance(value, float) else option_value(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]}…{text[-_LONGEST // 2 :]}"
