"""`batchscope hardware`: measure what each device of this machine can do.

    batchscope hardware
    batchscope hardware --device cpu --json
    batchscope hardware --products                  # what products of matrices take here and on cards: a minute

The lines have the peaks of each device: FLOP/s of products (matrices and convolutions) at each precision, bytes/s of
main memory, the time of one launch, and the size of the caches. For a card whose datasheet is known they have the share
of it that was measured. A calibration is kept, and measured once.

With --products, products of n×n matrices and two loops are measured here and predicted on NVIDIA's cards, with a picture.
In the documentation, choosing-a-device.md says how to read it.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UserError
from ..records.formatting import memory, percent, with_prefix
from . import command_parser
from .products import add_product_options, check_product_options, show_products

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration


def main() -> None:
    """The program: parse, measure, print."""
    parser = command_parser("hardware", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    device = "by default the CPU and the first GPU; CUDA_VISIBLE_DEVICES=1 names another"
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), help=device)
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
        print(json.dumps({"devices": {each.device: dataclasses.asdict(each) for each in found}}, indent=2))
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
    """What each device can do, a number a line, with its share of the datasheet's value where that is known."""
    from ..hardware.datasheet import datasheet

    lines = []
    for known in calibrations:
        threads = f"{known.threads} threads, " if known.threads else ""
        driver = f"{'' if known.device == 'cpu' else 'driver '}{known.driver}, " if known.driver else ""
        lines.append(f"{known.device}: {known.device_name} ({threads}{driver}torch {known.torch})")
        sheet = datasheet(known.device_name)
        stated = sheet.flops_per_sec if sheet else {}
        for precision in ("fp32", "tf32", "bf16", "fp16", "fp64"):
            flops = known.matmul_flops_per_sec.get(precision)
            lines += _line(f"products in {precision}", flops, "FLOP/s", stated.get(precision))
        of_memory = sheet.memory_bytes_per_sec if sheet else None
        lines += _line("main memory, read + write", known.memory_bytes_per_sec, "B/s", of_memory)
        lines += _line("one launch", known.launch_us and 1e-6 * known.launch_us, "s")
        lines += [f"  {'caches':26} {memory(known.cache_bytes)}"] if known.cache_bytes else []
    return "\n".join(lines)


def _line(label: str, value: float | None, unit: str, stated: float | None = None) -> list[str]:
    share = f" ({percent(value / stated)} of the datasheet)" if value and stated else ""
    return [f"  {label:26} {with_prefix(value, unit)}{share}"] if value else []
