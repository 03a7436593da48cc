"""Which runs of two folders are compared with each other, and what differs between them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..options.purpose import PLACES, purpose_of
from ..options.tree import flatten
from ..records.formatting import count, option_value
from ..records.rates import RATE
from ..records.values import at, table
from .groups import SweepResults, label
from .run import BATCH_SIZE, Run

_SAID = ("seed", "data.seed", "search", "resume", "run_dir")  # of which a difference says nothing, or is said elsewhere
_MOST_VALUES = 3  # of one option, in one line


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
    found = [_by_settings(side, keys, sizes_vary) for side in (a, b)]
    pairs = [
        Pair(_words(runs[0], keys, sizes_vary), runs, found[1][key])
        for key, runs in found[0].items()
        if key in found[1]
    ]
    lines = list(_left_over(a, b, found))
    if not pairs:
        raise UserError(f"compare: no run of one folder matches one of the other ({'; '.join(lines[:4])})")
    return pairs, lines


def _by_settings(side: SweepResults, keys: list[str], sizes_vary: bool) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in side.runs:
        if _is_measured(run):
            values = [run.settings.get(key) for key in keys] + ([run.batch_size] if sizes_vary else [])
            found.setdefault(json.dumps(values, sort_keys=True, default=str), []).append(run)
    return found


def _is_measured(run: Run) -> bool:
    return RATE in run.values and "step_ms_median" in run.values


def _words(run: Run, keys: list[str], sizes_vary: bool) -> str:
    words = [label(run, keys)] if keys else []
    return " · ".join([*words, *([f"batch size {run.batch_size:,}"] if sizes_vary and run.batch_size else [])])


def _left_over(a: SweepResults, b: SweepResults, found: list[dict[str, list[Run]]]) -> Iterator[str]:
    for name, side, own, other in (("A", a, *found), ("B", b, *reversed(found))):
        without = [run for run in side.runs if not _is_measured(run)]
        yield from (f"{name}, {run.name}: not measured ({_why_not(run)})" for run in without)
        alone = [run.name for key, runs in own.items() if key not in other for run in runs]
        if alone:
            yield f"{name}: nothing matches {', '.join(alone)}"


def _why_not(run: Run) -> str:
    return run.reason or str(at(run.record, "throughput.missing.bottleneck") or run.status)


def differences(pairs: list[Pair]) -> dict[str, list[str]]:
    """What differs between the sides, by where the records say so; places without a difference are left out."""
    places: dict[str, Callable[[Run], Mapping[str, Any]]] = {
        "configuration": _configuration,
        "versions": lambda run: table(run.record.get("versions")),
        "hardware": lambda run: table(run.record.get("hardware")),
        "data": lambda run: table(run.record.get("dataset")),
        "model": lambda run: table(run.record.get("model")),
    }
    found = {place: list(_differing(pairs, read)) for place, read in places.items()}
    return {place: lines for place, lines in found.items() if lines}


def _configuration(run: Run) -> dict[str, Any]:
    """All options but folders: also those of callbacks and loggers, which take time."""
    config = table(run.record.get("config"))
    here = str(config.get("run_dir") or run.folder)
    return {
        key: value
        for key, value in flatten(config)
        if key.partition(".")[0] not in _SAID
        and key not in _SAID
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
            found.setdefault(str(key), set()).add(option_value(value)[:100])
    return {key: frozenset(values) for key, values in found.items()}


def _text(values: frozenset[str] | None) -> str:
    return "—" if values is None else ", ".join(sorted(values))


def doubts(pairs: list[Pair]) -> list[str]:
    """What makes the two sides less comparable than their settings say, one line each."""
    reads: dict[str, Callable[[Run], Any]] = {
        "the models": lambda run: (run.model, at(run.record, "model.parameters")),
        "the data": lambda run: (run.dataset, at(run.record, "dataset.fingerprint")),
        "the devices": lambda run: (run.device, run.settings.get("device_name")),
    }
    lines = []
    for what, read in reads.items():
        sides = [{str(read(run)[0]) for pair in pairs for run in side(pair)} for side in (_a, _b)]
        if any({read(run) for run in pair.a} != {read(run) for run in pair.b} for pair in pairs):
            a, b = (", ".join(sorted(side)) for side in sides)
            lines.append(f"{what} differ" + (f": {a} and {b}" if a != b else ", though they have the same name"))
    if any(pair.a[0].global_batch_size != pair.b[0].global_batch_size for pair in pairs):
        lines.append("the batch sizes differ: a slowdown is judged by the time of a sample, not of a step")
    if {run.folder.resolve() for pair in pairs for run in pair.a} & {
        run.folder.resolve() for p in pairs for run in p.b
    }:
        lines.append("a run is compared with itself")
    return lines


def _a(pair: Pair) -> list[Run]:
    return pair.a


def _b(pair: Pair) -> list[Run]:
    return pair.b
