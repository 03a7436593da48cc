"""`batchscope hardware`: measure what each device of this machine can do.

    batchscope hardware
    batchscope hardware --device cpu --json

The table has the roofline peaks of each device: FLOP/s of matrix products and convolutions at each precision, and bytes/s
of main memory; then what a launch of an operation takes. For a card whose datasheet is known it
has what the datasheet states, and the share of it that was measured. A calibration is kept, and measured once.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import UserError, did_you_mean
from ..records.formatting import memory, percent, with_prefix
from . import command, command_parser

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration

_KINDS = ("cpu", "cuda", "mps")
_PRODUCTS, _MEMORY = "products in ", "main memory, read + write"
_LAUNCH, _CACHES = "one launch", "caches"
_ROWS = [f"{_PRODUCTS}{precision}" for precision in ("fp32", "tf32", "bf16", "fp16", "fp64")]
_ROWS += [_MEMORY, _LAUNCH, _CACHES]


@command
def main() -> None:
    """The program: parse, measure, print."""
    run(sys.argv[1:])


def run(arguments: Sequence[str]) -> None:
    """Measure and print.

    Raises:
        UserError: for a device that does not exist or that this machine does not have.
    """
    options = _parser().parse_args(arguments)
    if options.device not in (None, *_KINDS):
        near = did_you_mean(options.device, _KINDS)
        raise UserError(f"--device: got '{options.device}', takes cpu, cuda or mps.{near}")
    from ..hardware.devices import available  # torch takes seconds to import

    kinds = available()
    if options.device and options.device not in kinds:
        raise UserError(f"--device: got '{options.device}', and this machine has {' and '.join(kinds)}")
    found = [_calibration(kind, options.refresh) for kind in ([options.device] if options.device else kinds)]
    if options.json:
        print(json.dumps({"devices": {each.device: each.to_dict() for each in found}}, indent=2))
    else:
        print(as_text(found))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("hardware", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--device", help="cpu, cuda or mps; by default every device of this machine")
    parser.add_argument("--refresh", action="store_true", help="measure again, and replace what is in the cache")
    return parser


def _calibration(kind: str, refresh: bool) -> "Calibration":
    import torch

    from ..hardware.measure import cached_calibration, calibrate, store

    device = torch.device(kind)
    found = None if refresh else cached_calibration(device)
    if found is None:
        _say(f"measuring {kind}, which takes some seconds …")
        found = calibrate(device)
        store(found)
    if found.disturbed:
        _say(f"{found.disturbed}: the rates of this {kind} are too low, and are not kept for long")
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_text(calibrations: Sequence["Calibration"]) -> str:
    """A line for each device, and a table of what they can do; beside it the datasheet's values, where they are known."""
    import pandas as pd

    columns = {title: cells for each in calibrations for title, cells in _columns(each).items()}
    table = pd.DataFrame(columns, index=_ROWS).dropna(how="all").fillna("–")
    return "\n".join([*map(_described, calibrations), "", table.to_string()])


def _described(calibration: "Calibration") -> str:
    threads = f"{calibration.threads} threads, " if calibration.threads else ""
    driver = f"{'' if calibration.device == 'cpu' else 'driver '}{calibration.driver}, " if calibration.driver else ""
    return f"{calibration.device}: {calibration.device_name} ({threads}{driver}torch {calibration.torch})"


def _columns(calibration: "Calibration") -> dict[str, dict[str, str]]:
    """The columns of a device by title, each with its cells by the label of their row."""
    from ..hardware.datasheet import datasheet

    measured = _rates(calibration.matmul_flops_per_sec, calibration.memory_bytes_per_sec)
    cells = _shown(measured)
    if calibration.launch_us:
        cells[_LAUNCH] = f"{calibration.launch_us:.3g} µs"  # one unit in the row, however short
    if calibration.cache_bytes:
        cells[_CACHES] = memory(calibration.cache_bytes)
    sheet = datasheet(calibration.device_name)
    if sheet is None:
        return {calibration.device: cells}
    stated = _rates(sheet.flops_per_sec, sheet.memory_bytes_per_sec)
    reached = {label: percent(measured[label] / rate) for label, rate in stated.items() if label in measured}
    return {calibration.device: cells, "datasheet": _shown(stated), "reached": reached}


def _rates(flops_per_sec: Mapping[str, float], bytes_per_sec: float | None) -> dict[str, float]:
    """What is both measured and stated by a datasheet, by the label of its row."""
    rates = {f"{_PRODUCTS}{precision}": rate for precision, rate in flops_per_sec.items()}
    return rates | ({_MEMORY: bytes_per_sec} if bytes_per_sec else {})


def _shown(rates: Mapping[str, float]) -> dict[str, str]:
    return {label: with_prefix(rate, "B/s" if label == _MEMORY else "FLOP/s") for label, rate in rates.items()}
