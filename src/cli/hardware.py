"""`batchscope hardware`: measure what each device of this machine can do.

    batchscope hardware
    batchscope hardware --device cpu --json
    batchscope hardware --products                  # times of matrix products, here and on cards: a minute

The lines have the peaks of each device: FLOP/s of products (matrices and convolutions) at each precision, bytes/s of
main memory, the time of one launch, and the size of the caches. For a card whose datasheet is known they have the
measured share of the datasheet's value. A calibration is measured once, and kept.

With --products, products of n×n matrices and two loops are measured here and predicted on NVIDIA's cards, with a picture.
In the documentation, choosing-a-device.md says how to read it.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import UserError
from ..files import as_write_error
from ..hardware.datasheet import Datasheet, datasheet, find_cards
from ..records.formatting import memory, percent, with_prefix
from ..records.rates import REPORTED_LOAD
from ..records.terminal import LiveLine, columns, wrapped
from . import command_parser, default_folder, draw, number, picture

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration

CARDS = "t4,l4,a100,h100"
SCHEMA = 1  # of the JSON document of products
_MEASURE_S = 36.0  # for the products of all devices; imports and calibration take about ten seconds more


def main() -> None:
    """The program: parse, measure, print."""
    options = _parser().parse_args()
    for name in ("sizes", "cards", "plot"):
        if getattr(options, name) is not None and not options.products:
            raise UserError(f"--{name}: belongs to --products", exit_code=2)
    cards = find_cards(CARDS if options.cards is None else options.cards, "--cards")
    from ..hardware.devices import available  # torch takes seconds to import

    kinds = available()
    if options.device and options.device not in kinds:
        raise UserError(f"--device: got '{options.device}', and this machine has {' and '.join(kinds)}")
    calibrations = [_calibration(kind, options.refresh) for kind in ([options.device] if options.device else kinds)]
    if options.products:
        _show_products(calibrations, options, cards)
    elif options.json:
        devices = {calibration.device: dataclasses.asdict(calibration) for calibration in calibrations}
        print(json.dumps({"devices": devices}, indent=2))
    else:
        print("\n".join(line for calibration in calibrations for line in lines_of(calibration)))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("hardware", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    device = "by default the CPU and the first GPU; CUDA_VISIBLE_DEVICES=1 names another"
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), help=device)
    parser.add_argument("--refresh", action="store_true", help="measure again, and replace what is in the cache")
    parser.add_argument("--products", action="store_true", help="measure and predict products of matrices: a minute")
    parser.add_argument("--sizes", type=_parse_sizes, metavar="16,32,…", help="n of the n×n products; else 16 to 4,096")
    parser.add_argument("--cards", metavar="t4,l4,…", help=f"cards to predict ({CARDS}); `all` for every known one")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="file of the picture (in outputs/hardware/<time>)")
    return parser


def _parse_sizes(text: str) -> list[int]:
    return sorted({int(number(1, 10**6, int)(word)) for word in text.split(",")})


def _calibration(kind: str, refresh: bool) -> "Calibration":
    import torch

    from ..hardware.measure import cached_calibration, calibrate, store

    device = torch.device(kind)
    calibration = None if refresh else cached_calibration(device)
    if calibration is None:
        print(f"measuring {kind}, which takes some seconds …", file=sys.stderr, flush=True)
        calibration = calibrate(device)
        store(calibration)
    if calibration.disturbed:
        too_low = f"the rates of this {kind} are too low, and are not kept for long"
        print(f"{calibration.disturbed}: {too_low}", file=sys.stderr, flush=True)
    return calibration


def lines_of(calibration: "Calibration") -> Iterator[str]:
    """Yield the peaks of a device, one a line, with their share of the datasheet's value where that is known."""
    threads = f"{calibration.threads} threads, " if calibration.threads else ""
    driver = f"{'' if calibration.device == 'cpu' else 'driver '}{calibration.driver}, " if calibration.driver else ""
    yield f"{calibration.device}: {calibration.device_name} ({threads}{driver}torch {calibration.torch})"
    sheet = datasheet(calibration.device_name)
    stated = sheet.flops_per_sec if sheet else {}
    numbers = [
        (f"products in {precision}", calibration.matmul_flops_per_sec.get(precision), "FLOP/s", stated.get(precision))
        for precision in ("fp32", "tf32", "bf16", "fp16", "fp64")
    ]
    sheet_bandwidth = sheet.memory_bytes_per_sec if sheet else None
    numbers.append(("main memory, read + write", calibration.memory_bytes_per_sec, "B/s", sheet_bandwidth))
    numbers.append(("one launch", calibration.launch_us and 1e-6 * calibration.launch_us, "s", None))
    for label, value, unit, sheet_value in numbers:
        if value:
            share = f" ({percent(value / sheet_value)} of the datasheet)" if sheet_value else ""
            yield f"  {label:26} {with_prefix(value, unit)}{share}"
    if calibration.cache_bytes:
        yield f"  {'caches':26} {memory(calibration.cache_bytes)}"


def _show_products(calibrations: Sequence["Calibration"], args: argparse.Namespace, cards: Sequence[Datasheet]) -> None:
    """Measure matrix products on the devices of these calibrations, predict them on cards, print and draw.

    Raises:
        UserError: for a size that does not fit in memory, or if no size can be measured in the time.
        WriteError: if the picture cannot be written.
    """
    import torch  # takes seconds to import

    from ..analysis.noise import CONFIDENCE
    from ..choice.crossing import as_json
    from ..choice.interval import SURE
    from ..choice.products import measured_line, predicted_line, sentence, table
    from ..hardware.host_memory import host_memory
    from ..hardware.processor import NoiseMeter
    from ..hardware.products import PASSES, SIZES, Product, products, time_products

    sizes, lines, notes, live = args.sizes or SIZES, [], [], LiveLine()
    requested, required, seconds = products(sizes), Product(*[max(sizes)] * 3).bytes, _MEASURE_S / len(calibrations)
    for kind in (calibration.device for calibration in calibrations):
        if required > (free := torch.cuda.mem_get_info()[0] if kind == "cuda" else host_memory().available):
            reason = f"its matrices take {memory(required)} and do not fit in memory: {kind} has {memory(free)} free"
            raise UserError(f"--sizes: got {max(sizes):,}; {reason}")
    path = args.plot or default_folder("hardware") / "products.png"
    with as_write_error("--plot", path):  # refuse before a minute is spent
        path.parent.mkdir(parents=True, exist_ok=True)
    for calibration in calibrations:
        device, meter = torch.device(calibration.device), NoiseMeter()
        with contextlib.redirect_stdout(sys.stderr):
            times = time_products(requested, device, calibration.matmul_flops_per_sec["fp32"], seconds, live)
            live.clear()
        others_share = meter.read().others_share
        share = others_share if calibration.device == "cpu" and others_share >= REPORTED_LOAD else 0.0
        if share:
            notes.append(f"cpu: other programs took {percent(share)} of the processor: its times are too long")
        for product in requested:
            if product not in times:
                notes.append(f"{calibration.device}: {product}: not measured, for want of time or memory")
            elif product.loop and times[product].calls < PASSES:
                notes.append(f"{calibration.device}: {product}: {times[product].calls} passes measured, and scaled")
        lines.append(measured_line(calibration, times, share))
    if not all(line.times for line in lines):
        raise UserError(f"--sizes: none can be measured in {seconds:.0f} s; give smaller ones")
    lines += [predicted_line(requested, card, lines[0]) for card in cards]
    if args.json:
        document = {"schema": SCHEMA, **as_json(lines, sentence(lines)), "notes": notes}
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        names = ", ".join(f"{calibration.device} ({calibration.device_name})" for calibration in calibrations)
        head = f"measured on {names}, predicted on cards; intervals of {percent(CONFIDENCE)}, of ratios {percent(SURE)}"
        print("\n".join([*wrapped([head]), "", table(lines).to_string(line_width=columns()), "", *wrapped(notes)]))
    draw("draw_products", lines, path, sentence(lines), args.json)
