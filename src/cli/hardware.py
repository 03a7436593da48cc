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

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import UserError
from ..files import writing
from ..hardware.datasheet import Datasheet, datasheet, find_cards
from ..records.formatting import memory, percent, with_prefix
from ..records.rates import LOAD_SAID
from ..records.terminal import LiveLine, columns, wrapped
from . import command_parser, draw, folder_of, number, picture

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration

CARDS = "t4,l4,a100,h100"
SCHEMA = 1  # of the JSON document of products
_MEASURE_S = 36.0  # of products, shared by the devices: imports and calibration take about ten more


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
    found = [_calibration(kind, options.refresh) for kind in ([options.device] if options.device else kinds)]
    if options.products:
        _show_products(found, options, cards)
    elif options.json:
        print(json.dumps({"devices": {each.device: dataclasses.asdict(each) for each in found}}, indent=2))
    else:
        print("\n".join(line for each in found for line in lines_of(each)))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("hardware", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    device = "by default the CPU and the first GPU; CUDA_VISIBLE_DEVICES=1 names another"
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), help=device)
    parser.add_argument("--refresh", action="store_true", help="measure again, and replace what is in the cache")
    parser.add_argument("--products", action="store_true", help="measure and predict products of matrices: a minute")
    parser.add_argument("--sizes", type=_sizes, metavar="16,32,…", help="n of the n×n products; else 16 to 4,096")
    parser.add_argument("--cards", metavar="t4,l4,…", help=f"to predict; else {CARDS}; `all` for every known one")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="the picture; else in outputs/hardware/<time>")
    return parser


def _sizes(text: str) -> list[int]:
    return sorted({int(number(1, 10**6, int)(word)) for word in text.split(",")})


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


def lines_of(known: "Calibration") -> Iterator[str]:
    """What a device can do, a number a line, with its share of the datasheet's value where that is known."""
    threads = f"{known.threads} threads, " if known.threads else ""
    driver = f"{'' if known.device == 'cpu' else 'driver '}{known.driver}, " if known.driver else ""
    yield f"{known.device}: {known.device_name} ({threads}{driver}torch {known.torch})"
    sheet = datasheet(known.device_name)
    stated = sheet.flops_per_sec if sheet else {}
    numbers = [
        (f"products in {precision}", known.matmul_flops_per_sec.get(precision), "FLOP/s", stated.get(precision))
        for precision in ("fp32", "tf32", "bf16", "fp16", "fp64")
    ]
    of_memory = sheet.memory_bytes_per_sec if sheet else None
    numbers.append(("main memory, read + write", known.memory_bytes_per_sec, "B/s", of_memory))
    numbers.append(("one launch", known.launch_us and 1e-6 * known.launch_us, "s", None))
    for label, value, unit, of_sheet in numbers:
        if value:
            share = f" ({percent(value / of_sheet)} of the datasheet)" if of_sheet else ""
            yield f"  {label:26} {with_prefix(value, unit)}{share}"
    if known.cache_bytes:
        yield f"  {'caches':26} {memory(known.cache_bytes)}"


def _show_products(known: Sequence["Calibration"], options: argparse.Namespace, cards: Sequence[Datasheet]) -> None:
    """Measure products on the devices of these calibrations, predict them on cards, print and draw.

    Raises:
        UserError: for a size that does not fit in memory, and where none can be measured in the time.
        WriteError: if the picture cannot be written.
    """
    import torch  # which takes seconds

    from ..analysis.noise import CONFIDENCE
    from ..choice.crossing import as_json
    from ..choice.interval import SURE
    from ..choice.products import measured_line, predicted_line, sentence, table
    from ..hardware.host_memory import host_memory
    from ..hardware.processor import NoiseMeter
    from ..hardware.products import PASSES, SIZES, Product, measure, products

    sizes, lines, notes, live = options.sizes or SIZES, [], [], LiveLine()
    wanted, needs = products(sizes), Product(*[max(sizes)] * 3).bytes
    for kind in (each.device for each in known):
        if needs > (free := torch.cuda.mem_get_info()[0] if kind == "cuda" else host_memory().available):
            does = f"its matrices take {memory(needs)} and do not fit in memory: {kind} has {memory(free)} free"
            raise UserError(f"--sizes: got {max(sizes):,}; {does}")
    place = options.plot or folder_of("hardware") / "products.png"
    with writing("--plot", place):  # before a minute is spent
        place.parent.mkdir(parents=True, exist_ok=True)
    for each in known:
        device, meter = torch.device(each.device), NoiseMeter()
        with contextlib.redirect_stdout(sys.stderr):
            found = measure(wanted, device, each.matmul_flops_per_sec["fp32"], _MEASURE_S / len(known), live)
            live.clear()
        others_share = meter.read().others_share
        share = others_share if each.device == "cpu" and others_share >= LOAD_SAID else 0.0
        if share:
            notes.append(f"cpu: other programs took {percent(share)} of the processor: its times are too long")
        for of in wanted:
            if of not in found:
                notes.append(f"{each.device}: {of}: not measured, for want of time or memory")
            elif of.loop and found[of].calls < PASSES:
                notes.append(f"{each.device}: {of}: {found[of].calls} passes measured, and scaled")
        lines.append(measured_line(each, found, share))
    if not all(line.times for line in lines):
        raise UserError(f"--sizes: none can be measured in {_MEASURE_S / len(known):.0f} s; give smaller ones")
    lines += [predicted_line(wanted, card, lines[0]) for card in cards]
    if options.json:
        document = {"schema": SCHEMA, **as_json(lines, sentence(lines)), "notes": notes}
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        names = ", ".join(f"{each.device} ({each.device_name})" for each in known)
        head = f"measured on {names}, predicted on cards; intervals of {percent(CONFIDENCE)}, of ratios {percent(SURE)}"
        print("\n".join([*wrapped([head]), "", table(lines).to_string(line_width=columns()), "", *wrapped(notes)]))
    draw("draw_products", lines, place, sentence(lines), options.json)
