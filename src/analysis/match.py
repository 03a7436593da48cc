"""Which runs of two folders are compared with each other, and what differs between them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..options.purpose import PLACES, purpose_of
from ..options.tree import flatten
from ..records.formatting import count, option_value
from ..records.values import at, table
from .groups import SweepResults, label
from .run import BATCH_SIZE, Run

_SAID = ("seed", "data.seed", "search", "resume", "run_dir")  # of which a difference says nothing, or is said elsewhere
_MOST_VALUES = 3  # of one option, in one line
_LONGEST = 60  # characters of a value


@dataclass(frozen=True)
class Pair:
    """What is compared: runs that repeat one another on each side."""

    label: str  # what sets the pair apart from the others; empty for a single one
    a: list[Run]
    b: list[Run]


def match(a: SweepResults, b: SweepResults) -> tuple[list[Pair], list[str]]:
    """The pairs, and a line on each run that has no counterpart.

    Runs match if they agree in the batch size and in all that varies within a folder. What is the same within each
    folder, and differs between them, is what is compared.

    Raises:
        UserError: if no measured run of one folder matches one of the other.
    """
    keys = [key for key in dict.fromkeys([*a.dividing, *b.dividing]) if key != "device_name"]
    sizes_vary = any(BATCH_SIZE in side.varied for side in (a, b))
    of_a, of_b = (_by_settings(side, keys, sizes_vary) for side in (a, b))
    common = [key for key in of_a if key in of_b]
    lines = [*_left_over("A", a, of_a, of_b), *_left_over("B", b, of_b, of_a)]
    if not common:
        raise UserError(f"compare: no run of one folder matches one of the other ({'; '.join(lines[:4])})")
    return [Pair(_words(of_a[key][0], keys, sizes_vary), of_a[key], of_b[key]) for key in common], lines


def _by_settings(side: SweepResults, keys: list[str], sizes_vary: bool) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in side.runs:
        if run.samples_a_step:
            values = [run.settings.get(key) for key in keys] + ([run.batch_size] if sizes_vary else [])
            found.setdefault(json.dumps(values, sort_keys=True, default=str), []).append(run)
    return found


def _words(run: Run, keys: list[str], sizes_vary: bool) -> str:
    size = f"batch size {run.batch_size:,}" if sizes_vary and run.batch_size else ""
    return " · ".join(filter(None, [label(run, keys) if keys else "", size]))


def _left_over(name: str, side: SweepResults, own: dict[str, list[Run]], other: dict[str, list[Run]]) -> Iterator[str]:
    for run in side.runs:
        if not run.samples_a_step:
            why = run.reason or at(run.record, "throughput.missing.bottleneck") or run.status
            yield f"{name}, {run.name}: not measured ({why})"
    if alone := [run.name for key, runs in own.items() if key not in other for run in runs]:
        yield f"{name}: nothing matches {', '.join(alone)}"


def differences(pairs: list[Pair]) -> dict[str, list[str]]:
    """What differs between the sides, by where the records say so; places without a difference are left out."""
    places: dict[str, Callable[[Run], Mapping[str, Any]]] = {"configuration": _configuration}
    keys = {"versions": "versions", "hardware": "hardware", "data": "dataset", "model": "model"}
    places |= {place: lambda run, key=key: table(run.record.get(key)) for place, key in keys.items()}
    found = {place: list(_differing(pairs, read)) for place, read in places.items()}
    return {place: lines for place, lines in found.items() if lines}


def _configuration(run: Run) -> dict[str, Any]:
    """All options but folders: also those of callbacks and loggers, which take time."""
    config = table(run.record.get("config"))
    here = str(config.get("run_dir") or run.folder)
    return {
        key: value
        for key, value in flatten(config)
        if not {key, key.partition(".")[0]} & {*_SAID}
        and purpose_of(key, config) not in PLACES
        and not (isinstance(value, str) and here in value)
    }


def _differing(pairs: list[Pair], read: Callable[[Run], Mapping[str, Any]]) -> Iterator[str]:
    changes: dict[str, dict[str, None]] = {}
    for pair in pairs:
        before, after = (_values(side, read) for side in (pair.a, pair.b))
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                change = f"{_text(before.get(key))} → {_text(after.get(key))}"
                changes.setdefault(key, {})[change] = None
    for key, found in changes.items():
        more = f"; and {count(len(found) - _MOST_VALUES, 'other')}" if len(found) > _MOST_VALUES else ""
        yield f"{key}: {'; '.join(list(found)[:_MOST_VALUES])}{more}"


def _values(runs: Iterable[Run], read: Callable[[Run], Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Every value of each key over repeated runs."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for key, value in read(run).items():
            found.setdefault(str(key), set()).add(option_value(value)[:_LONGEST])
    return {key: frozenset(values) for key, values in found.items()}


def _text(values: frozenset[str] | None) -> str:
    return "—" if values is None else ", ".join(sorted(values))


def doubts(pairs: list[Pair]) -> Iterator[str]:
    """What makes the two sides less comparable than their settings say, one line each."""
    reads: dict[str, Callable[[Run], tuple[str, Any]]] = {
        "the models": lambda run: (run.model, at(run.record, "model.parameters")),
        "the data": lambda run: (run.dataset, at(run.record, "dataset.fingerprint")),
        "the devices": lambda run: (run.device, run.settings.get("device_name")),
    }
    for what, read in reads.items():
        facts = [[{str(read(run)) for run in side} for side in (pair.a, pair.b)] for pair in pairs]
        if any(a != b for a, b in facts):
            a, b = (", ".join(sorted({read(run)[0] for run in side})) for side in _sides(pairs))
            yield f"{what} differ" + (f": {a} and {b}" if a != b else ", though they have the same name")
    if any(pair.a[0].global_batch_size != pair.b[0].global_batch_size for pair in pairs):
        yield "the batch sizes differ: what is compared is the time of a sample, not of a step"
    a, b = ({run.folder.resolve() for run in side} for side in _sides(pairs))
    if a & b:
        yield "a run is compared with itself"


def _sides(pairs: list[Pair]) -> tuple[list[Run], list[Run]]:
    return [run for pair in pairs for run in pair.a], [run for pair in pairs for run in pair.b]
