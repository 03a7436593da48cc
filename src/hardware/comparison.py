"""What `batchscope hardware` measures: the calibrations of devices, products of matrices on each, and their tables."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..records.formatting import duration, with_prefix
from .calibration import PRECISIONS, Calibration
from .calibration_cache import cached_calibration, store
from .devices import available
from .measure import calibrate
from .timing import Work

REPETITIONS = 100
LARGE, SMALL = (7000, 3000), (70, 30)
SIZES = [(SMALL[0] * 2**k, SMALL[1] * 2**k) for k in range(6)]  # 70×30 to 2240×960
_ABILITIES = {
    "memory_bytes_per_sec": "main memory, read + write",
    "copy_bytes_per_sec": "memory copy, read + write",
    "h2d_bytes_per_sec": "host to device",
    "h2d_pinned_bytes_per_sec": "host to device, pinned",
    "d2h_bytes_per_sec": "device to host",
    "d2h_pinned_bytes_per_sec": "device to host, pinned",
}


@dataclass(frozen=True)
class Comparison:
    """Seconds that each device takes for 100 products `A @ A.T` of one size."""

    rows: int
    columns: int
    seconds: Mapping[str, float]

    @property
    def winner(self) -> str:
        """The fastest device."""
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def size(self) -> str:
        """The matrix: `70×30`."""
        return f"{self.rows}×{self.columns}"


def measure(
    device: str | None, refresh: bool, quick: bool
) -> tuple[list[Calibration], list[Comparison], list[Comparison]]:
    """The calibrations of the devices, the products of a large and of a small matrix, and those of sizes between them.

    Args:
        device: `cpu`, `cuda`, `mps` or `gpu`; None measures every device of this machine.
        refresh: measure what is in the cache again.
        quick: take less time, and cache nothing.

    Raises:
        UserError: for a device that this machine does not have.
    """
    kinds = [_checked(device)] if device else available()
    calibrations = [_calibration(kind, refresh, quick) for kind in kinds]
    budget = 0.2 if quick else 2.0
    products = [compare(kinds, *size, budget) for size in (LARGE, SMALL)]
    sizes = [compare(kinds, *size, budget / 20) for size in SIZES] if len(kinds) > 1 else []
    return calibrations, products, sizes


def _checked(given: str) -> str:
    found = available()
    kind = next((kind for kind in found if kind != "cpu"), "cuda") if given == "gpu" else given
    if kind not in found:
        raise UserError(f"--device: got '{given}', and this machine has {' and '.join(found)}")
    return kind


def _calibration(kind: str, refresh: bool, quick: bool) -> Calibration:
    device = torch.device(kind)
    if not refresh and (found := cached_calibration(device)) and not found.disturbed:
        return found
    found = calibrate(device, quick, _say)
    if found.disturbed:
        _say(f"{found.disturbed}: the rates of this {kind} are too low, and are not kept for long")
    if not quick:
        store(found)
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compare(kinds: Sequence[str], rows: int, columns: int, budget: float) -> Comparison:
    """Time `(A @ A.T).sum()` in float32, `A: (rows, columns)`, on each kind of device for `budget` seconds."""
    seconds = {}
    for kind in kinds:
        _say(f"comparing {kind}: products of {rows}×{columns}")
        with torch.inference_mode():
            work = Work(1.0, partial(_product, torch.device(kind), rows, columns))
            work.take_turn(budget)
        seconds[kind] = REPETITIONS / work.rate
    return Comparison(rows, columns, seconds)


def _product(device: torch.device, rows: int, columns: int) -> Callable[[], Tensor]:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)
    return lambda: (matrix @ matrix.T).sum()


def as_json(
    calibrations: Sequence[Calibration], products: Sequence[Comparison], sizes: Sequence[Comparison]
) -> dict[str, Any]:
    """Everything in plain containers; seconds are for 100 products."""
    return {
        "devices": {calibration.device: calibration.to_dict() for calibration in calibrations},
        "products": [{**asdict(each), "winner": each.winner} for each in products],
        "sweep": [{**asdict(each), "winner": each.winner} for each in sizes],
    }


def as_text(calibrations: Sequence[Calibration], products: Sequence[Comparison], sizes: Sequence[Comparison]) -> str:
    """Two tables with a column for each device, and the sizes at which the fastest device changes."""
    kinds = [calibration.device for calibration in calibrations]
    return "\n".join(
        [
            *(f"{each.device}: {_described(each)}" for each in calibrations),
            "",
            *_aligned([["", *kinds], *_abilities(calibrations)]),
            "",
            f"{REPETITIONS} products A @ A.T in float32, summed up",
            *_aligned([["A", *kinds, *(["fastest"] if sizes else [])], *map(_product_row, products)]),
            "",
            _conclusion(kinds, sizes),
        ]
    )


def _described(calibration: Calibration) -> str:
    threads = f"{calibration.threads} threads, " if calibration.threads else ""
    driver = f"{'' if calibration.device == 'cpu' else 'driver '}{calibration.driver}, " if calibration.driver else ""
    return f"{calibration.device_name} ({threads}{driver}torch {calibration.torch})"


def _abilities(calibrations: Sequence[Calibration]) -> list[list[str]]:
    """A row for each quantity that at least one device has."""

    def row(label: str, unit: str, values: list[float | None]) -> list[str]:
        return [label, *("–" if value is None else with_prefix(value, unit) for value in values)]

    rows = [
        row(f"products in {name}", "FLOP/s", [each.matmul_flops_per_sec.get(name) for each in calibrations])
        for name in PRECISIONS
    ]
    rows += [row(label, "B/s", [getattr(each, key) for each in calibrations]) for key, label in _ABILITIES.items()]
    caches = (each.cache_bytes for each in calibrations)
    rows.append(["caches", *("–" if size is None else f"{size / 2**20:.3g} MiB" for size in caches)])
    launches = [each.launch_us for each in calibrations]
    rows.append(row("one small operation", "s", [None if us is None else us / 1e6 for us in launches]))
    faults = [each.page_fault_us for each in calibrations]
    rows.append(row("one page fault", "s", [None if us is None else us / 1e6 for us in faults]))
    return [row for row in rows if any(cell != "–" for cell in row[1:])]


def _product_row(each: Comparison) -> list[str]:
    cells = [duration(seconds) for seconds in each.seconds.values()]
    if len(cells) > 1:
        cells.append(f"{each.winner}, {max(each.seconds.values()) / each.seconds[each.winner]:.3g} times")
    return [each.size, *cells]


def _conclusion(kinds: Sequence[str], sizes: Sequence[Comparison]) -> str:
    if not sizes:
        return f"Only {kinds[0]} was measured: there is nothing to compare it with."
    changes = [here for before, here in pairwise(sizes) if here.winner != before.winner]
    if not changes:
        return f"{sizes[0].winner} is the fastest at every size from {sizes[0].size} to {sizes[-1].size}."
    later = "".join(f", {each.winner} from {each.size} on" for each in changes)
    return f"{sizes[0].winner} is the fastest from {sizes[0].size} on{later}."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need to be: labels to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return ["  ".join(line).rstrip() for line in lines]
