"""`batchscope hardware`: measure what each device of this machine can do.

    batchscope hardware
    batchscope hardware --device cpu --json
    batchscope hardware --products                  # what products of matrices take here and on cards: a minute

The table has the peaks of each device: FLOP/s of products (matrices and convolutions) at each precision, bytes/s of
main memory, the time of one launch, and the size of the caches. For a card whose datasheet is known it has what the
datasheet states, and the share of it that was measured. A calibration is kept, and measured once.

With --products, products of n×n matrices and two loops are measured here and predicted on NVIDIA's cards, with a picture.
In the documentation, choosing-a-device.md says how to read it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UserError
from ..records.formatting import memory, percent, with_prefix
from . import command_parser
from .products import add_product_options, check_product_options, show_products

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")
# A row of the table, and how its numbers are written.
_ROWS: dict[str, Callable[[float], str]] = {
    **{f"products in {precision}": partial(with_prefix, unit="FLOP/s") for precision in _PRECISIONS},
    "main memory, read + write": partial(with_prefix, unit="B/s"),
    "one launch": "{:.3g} µs".format,  # one unit in the row, however short
    "caches": memory,
}


def main() -> None:
    """The program: parse, measure, print."""
    parser = command_parser("hardware", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), help="by default every device of this machine")
    parser.add_argument("--refresh", action="store_true", help="measure again, and replace what is in the cache")
    add_product_options(parser)
    options = parser.parse_args()
    cards = check_product_options(options)
    from ..hardware.devices import available  # torch takes seconds to import

    kinds = available()
    if options.device and options.device not in kinds:
        raise UserError(f"--device: got '{options.device}', and this machine has {' and '.join(kinds)}")
    found = [_calibration(kind, options.refresh) for kind in ([options.device] if options.device else kinds)]
    if options.products:
        show_products(found, options, cards)
    elif options.json:
        print(json.dumps({"devices": {each.device: each.to_dict() for each in found}}, indent=2))
    else:
        print(as_text(found))


def _calibration(kind: str, refresh: bool) -> "Calibration":
    import torch

    from ..hardware.measure import cached_calibration, calibrate, store

    device = torch.device(kind)
    found = None if refresh else cached_calibration(device)
    if found is None:
        print(f"measuring {kind}, which takes some seconds …", file=sys.stderr, flush=True)
        found = calibrate(device)
        store(found)
    if found.disturbed:
        too_low = f"the rates of this {kind} are too low, and are not kept for long"
        print(f"{found.disturbed}: {too_low}", file=sys.stderr, flush=True)
    return found


def as_text(calibrations: Sequence["Calibration"]) -> str:
    """A line for each device, and a table of what they can do, beside the datasheet's values where they are known."""
    import pandas as pd

    from ..hardware.datasheet import datasheet

    numbers, reached = pd.DataFrame(index=[*_ROWS], dtype=float), None
    for known in calibrations:
        others = (known.memory_bytes_per_sec, known.launch_us, known.cache_bytes)
        numbers[known.device] = pd.Series(_column(known.matmul_flops_per_sec, *others))
        if sheet := datasheet(known.device_name):
            numbers["datasheet"] = pd.Series(_column(sheet.flops_per_sec, sheet.memory_bytes_per_sec))
            reached = numbers[known.device] / numbers["datasheet"]
    known_rows = numbers.dropna(how="all").iterrows()
    cells = pd.DataFrame([row.map(_ROWS[str(name)], na_action="ignore") for name, row in known_rows], dtype=object)
    if reached is not None:
        cells["reached"] = reached.map(percent, na_action="ignore")
    return "\n".join([*map(_described, calibrations), "", cells.fillna("–").to_string()])


def _described(calibration: "Calibration") -> str:
    threads = f"{calibration.threads} threads, " if calibration.threads else ""
    driver = f"{'' if calibration.device == 'cpu' else 'driver '}{calibration.driver}, " if calibration.driver else ""
    return f"{calibration.device}: {calibration.device_name} ({threads}{driver}torch {calibration.torch})"


def _column(flops_per_sec: Mapping[str, float], *others: float | None) -> dict[str, float]:
    """The numbers of a column that are known, by the labels of their rows; `others` are those below the products."""
    values = [*map(flops_per_sec.get, _PRECISIONS), *others]
    return {label: float(value) for label, value in zip(_ROWS, values, strict=False) if value}
