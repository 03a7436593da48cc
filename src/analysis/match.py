"""Which runs of two folders are compared with each other, and what differs between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..options.purpose import PLACES, purpose_of
from ..options.tree import flatten
from ..records.formatting import option_value
from ..records.values import at, table
from .groups import SweepResults, label
from .run import BATCH_SIZE, Run

_SAID = {"seed", "data.seed", "search", "resume", "run_dir"}  # a difference says nothing, or is said elsewhere
_RECORDED = {"versions": "versions", "hardware": "hardware", "data": "dataset", "model": "model"}
_MOST_VALUES = 3  # of one option, in one line
_LONGEST = 60  # characters of a value
_ByKey = dict[tuple[str, int | None], list[Run]]  # the runs of a side, by what they are matched by


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
    keys = [key for key in dict.fromkeys([*a.group_keys, *b.group_keys]) if key != "device_name"]
    sizes_vary = any(BATCH_SIZE in side.factors for side in (a, b))
    of_a, of_b = _ByKey(), _ByKey()
    for side, by_key in ((a, of_a), (b, of_b)):
        for run in (run for run in side.runs if run.samples_a_step):
            key = run.signature(keys.__contains__), run.batch_size if sizes_vary else None
            by_key.setdefault(key, []).append(run)
    lines = [*_left_over("A", a, of_a, of_b), *_left_over("B", b, of_b, of_a)]
    pairs = [Pair(_label(of_a[key][0], keys, sizes_vary), of_a[key], of_b[key]) for key in of_a if key in of_b]
    if not pairs:
        raise UserError(f"compare: no run of one folder matches one of the other ({'; '.join(lines[:4])})")
    return pairs, lines


def _label(run: Run, keys: list[str], sizes_vary: bool) -> str:
    size = f"batch size {run.batch_size:,}" if sizes_vary and run.batch_size else ""
    return " · ".join(filter(None, [label(run, keys) if keys else "", size]))


def _left_over(name: str, side: SweepResults, own: _ByKey, other: _ByKey) -> Iterator[str]:
    for run in (run for run in side.runs if not run.samples_a_step):
        why = run.reason or at(run.record, "throughput.missing.bottleneck") or run.status
        yield f"{name}, {run.name}: not measured ({why})"
    if alone := [run.name for key, runs in own.items() if key not in other for run in runs]:
        yield f"{name}: nothing matches {', '.join(alone)}"


def differences(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """What differs between the sides, by where the records say so; places without a difference are left out."""
    found = {"configuration": _differing(pairs, _configuration)}
    for place, key in _RECORDED.items():
        found[place] = _differing(pairs, lambda run, key=key: table(run.record.get(key)))
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


def _differing(pairs: Sequence[Pair], read: Callable[[Run], Mapping[str, Any]]) -> list[str]:
    """A line for each key: `lr: 0.1 → 0.2`, with the changes of the first pairs. Of repeated runs the first one is read."""
    changes: dict[str, dict[str, None]] = {}
    for pair in pairs:
        a, b = read(pair.a[0]), read(pair.b[0])
        for key in dict.fromkeys([*a, *b]):
            if (key in a) != (key in b) or a[key] != b[key]:
                before, after = (_shown(side[key]) if key in side else "—" for side in (a, b))
                changes.setdefault(str(key), {})[f"{before} → {after}"] = None
    shown = {key: [*texts][:_MOST_VALUES] + ["…"] * (len(texts) > _MOST_VALUES) for key, texts in changes.items()}
    return [f"{key}: {'; '.join(texts)}" for key, texts in shown.items()]


def _shown(value: Any) -> str:
    """A value, all its digits; of a long text its begin and its end."""
    text = repr(value) if isinstance(value, float) else option_value(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]}…{text[-_LONGEST // 2 :]}"
