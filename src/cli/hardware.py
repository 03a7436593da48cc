"""What can this machine do? `python -m batchscope.hardware` measures each of its devices and compares them.

The comparison is a product of a matrix with its own transpose, summed up, 100 times over: a large matrix on which a
GPU shows what it can do, a small one on which it cannot, and the size between at which the fastest device changes.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from ..errors import UserError, did_you_mean, exit_on_user_error, refuse_in_one_line
from ..hardware import calibrate as measuring
from ..hardware.calibrate import Calibration, Timer, timer_for
from ..hardware.devices import available

KINDS = ("cpu", "cuda", "mps")
REPETITIONS = 100
_ROUNDS = 5  # that fit into a budget, about; the fastest counts
LARGE, SMALL = (7000, 3000), (70, 30)
SWEEP = [(SMALL[0] * 2**k, SMALL[1] * 2**k) for k in range(6)]  # 70×30 to 2240×960


@dataclass(frozen=True)
class Comparison:
    """Seconds that each device takes for the products of one size.

    Attributes:
        rows, columns: of the matrix; `A @ A.T` is rows × rows.
        repetitions: what the seconds are for.
        seconds: by device; the matrix lies in its memory already.
        measured: how many were timed; where that is fewer than the repetitions, the seconds are scaled up.
    """

    rows: int
    columns: int
    repetitions: int
    seconds: Mapping[str, float]
    measured: Mapping[str, int]

    @property
    def winner(self) -> str:
        """The fastest device."""
        return min(self.seconds, key=lambda kind: self.seconds[kind])


def main() -> None:
    """The command line."""
    exit_on_user_error(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> None:
    """Measure, compare, print.

    Raises:
        UserError: for a device that does not exist, or that this machine does not have.
    """
    options = _parser().parse_args(arguments)
    kinds = [_checked(options.device)] if options.device else available()
    calibrations = [_calibration(kind, options.refresh, options.quick) for kind in kinds]
    budget = 0.2 if options.quick else 2.0
    timers = {kind: timer_for(torch.device(kind)) for kind in kinds}
    products = [compare(timers, *size, REPETITIONS, budget) for size in (LARGE, SMALL)]
    sweep = [compare(timers, *size, 1, budget / 20) for size in SWEEP] if len(kinds) > 1 else []
    if options.json:
        print(json.dumps(as_json(calibrations, products, sweep), indent=2))
    else:
        print(as_text(calibrations, products, sweep))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m batchscope.hardware", description=__doc__.splitlines()[0])
    refuse_in_one_line(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--device", help="cpu, cuda or mps; by default every device that this machine has")
    parser.add_argument("--refresh", action="store_true", help="measure again what is in the cache")
    parser.add_argument("--quick", action="store_true", help="less time, less accurate, and not cached")
    return parser


def _checked(given: str) -> str:
    found = available()
    kind = next((kind for kind in found if kind != "cpu"), "cuda") if given == "gpu" else given
    if kind not in KINDS:
        raise UserError(f"--device: got '{given}', takes cpu, cuda or mps.{did_you_mean(given, KINDS)}")
    if kind not in found:
        raise UserError(f"--device: got '{given}', and this machine has {' and '.join(found)}")
    return kind


def _calibration(kind: str, refresh: bool, quick: bool) -> Calibration:
    device = torch.device(kind)
    found = None if refresh else measuring.cached_calibration(device)
    if found is not None:
        return found
    found = measuring.calibrate(device, quick, _say)
    if found.disturbed:
        _say(f"{found.disturbed}: what was measured of this {kind} is too low, and not kept")
    if not quick:
        measuring.keep(found)
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- the comparison -----------------------------------------------------------------------------------------------


def compare(timers: Mapping[str, Timer], rows: int, columns: int, repetitions: int, budget: float) -> Comparison:
    """Time `repetitions` times `(A @ A.T).sum()` in float32, `A: (rows, columns)`, on each device.

    Args:
        timers: by device.
        budget: seconds for each device; where all repetitions do not fit in several times, fewer are timed at once, one at least.
    """
    seconds, measured = {}, {}
    for kind, timer in timers.items():
        _say(f"comparing {kind}: products of {_size(rows, columns)}")
        seconds[kind], measured[kind] = products_take(torch.device(kind), timer, rows, columns, repetitions, budget)
    return Comparison(rows, columns, repetitions, seconds, measured)


def products_take(
    device: torch.device, timer: Timer, rows: int, columns: int, repetitions: int, budget: float
) -> tuple[float, int]:
    """Seconds that the repetitions take in the fastest round, and how many of them that round was."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(rows, columns, generator=generator).to(device)
    total = torch.zeros((), device=device)

    def product() -> None:
        total.add_((matrix @ matrix.T).sum())

    with torch.inference_mode():
        (matrix[:1] @ matrix[:1].T).sum()  # starts what a device starts with its first product
        best = spent = timer(product, 1)
        measured = 1
        while spent < budget:
            times = max(1, min(repetitions, int(budget / _ROUNDS / best)))
            seconds = timer(product, times)
            spent += seconds
            if seconds / times <= best:
                best, measured = seconds / times, times
    return best * repetitions, measured


def winners(sweep: Iterable[Comparison]) -> list[Comparison]:
    """The first size of a sweep, and every size at which another device has become the fastest."""
    sizes = list(sweep)
    return sizes[:1] + [here for before, here in pairwise(sizes) if here.winner != before.winner]


# --- what is printed ----------------------------------------------------------------------------------------------


def as_json(
    calibrations: Sequence[Calibration], products: Sequence[Comparison], sweep: Sequence[Comparison]
) -> dict[str, Any]:
    """Everything, in plain containers; seconds are for all repetitions."""
    return {
        "devices": {calibration.device: calibration.to_dict() for calibration in calibrations},
        "products": [{**asdict(each), "winner": each.winner} for each in products],
        "sweep": [{**asdict(each), "winner": each.winner} for each in sweep],
    }


def as_text(calibrations: Sequence[Calibration], products: Sequence[Comparison], sweep: Sequence[Comparison]) -> str:
    """Two tables, a column a device, and what follows from them."""
    kinds = [calibration.device for calibration in calibrations]
    names = [f"{each.device}: {_described(each)}" for each in calibrations]
    return "\n".join(
        [
            *names,
            "",
            *_table([["", *kinds], *_abilities(calibrations)]),
            "",
            f"{REPETITIONS} products A @ A.T in float32, summed up",
            *_table([["A", *kinds, *(["fastest"] if sweep else [])], *(_product_row(each) for each in products)]),
            "",
            *_verdict(kinds, sweep),
        ]
    )


def _described(calibration: Calibration) -> str:
    threads = f"{calibration.threads} threads, " if calibration.threads else ""
    driver = f"{'' if calibration.device == 'cpu' else 'driver '}{calibration.driver}, " if calibration.driver else ""
    return f"{calibration.device_name} ({threads}{driver}torch {calibration.torch})"


def _abilities(calibrations: Sequence[Calibration]) -> list[list[str]]:
    """A row for each quantity that a device has."""
    dicts = [calibration.to_dict() for calibration in calibrations]
    rows = []
    for precision in measuring.PRECISIONS:
        values = [each["matmul_flops_per_sec"].get(precision) for each in dicts]
        rows.append([f"products in {precision}", *(_scaled(value, "FLOP/s") for value in values)])
    for key, label in (
        ("copy_bytes_per_sec", "memory copy, read + write"),
        ("h2d_bytes_per_sec", "host to device"),
        ("h2d_pinned_bytes_per_sec", "host to device, pinned"),
        ("d2h_bytes_per_sec", "device to host"),
        ("d2h_pinned_bytes_per_sec", "device to host, pinned"),
    ):
        rows.append([label, *(_scaled(each.get(key), "B/s") for each in dicts)])
    launches = [each.get("launch_us") for each in dicts]
    rows.append(["one small operation", *("–" if us is None else f"{us:.1f} µs" for us in launches)])
    return [row for row in rows if any(cell != "–" for cell in row[1:])]


def _product_row(each: Comparison) -> list[str]:
    cells = []
    for kind, seconds in each.seconds.items():
        part = each.measured[kind]
        scaled = f" (measured {part}, scaled to {each.repetitions})" if part < each.repetitions else ""
        cells.append(f"{_duration(seconds)}{scaled}")
    if len(cells) > 1:
        cells.append(f"{each.winner}, {max(each.seconds.values()) / each.seconds[each.winner]:.3g} times")
    return [_size(each.rows, each.columns), *cells]


def _verdict(kinds: Sequence[str], sweep: Sequence[Comparison]) -> list[str]:
    if not sweep:
        return [f"Only {kinds[0]} was measured: there is nothing to compare it with."]
    first, *changes = winners(sweep)
    if not changes:
        ends = _size(first.rows, first.columns), _size(sweep[-1].rows, sweep[-1].columns)
        return [f"{first.winner} is the fastest at every size from {ends[0]} to {ends[1]}."]
    lines = [f"{first.winner} is the fastest from {_size(first.rows, first.columns)} on,"]
    lines += [f"{each.winner} from {_size(each.rows, each.columns)} on," for each in changes]
    return [" ".join(lines).rstrip(",") + "."]


def _size(rows: int, columns: int) -> str:
    return f"{rows}×{columns}"


def _scaled(value: float | None, unit: str) -> str:
    """Three digits and a prefix: `468 GFLOP/s`."""
    if value is None:
        return "–"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need to be, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    main()
