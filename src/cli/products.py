"""`batchscope hardware --products`: its options, what is measured and predicted, and what is printed."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import write_bytes, writing
from ..hardware.datasheet import Datasheet, find_cards
from ..records.formatting import memory, percent
from ..records.rates import LOAD_SAID
from ..records.terminal import LiveLine, wrapped
from . import folder_of, number

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration

CARDS = "t4,l4,a100,h100"
SCHEMA = 1  # of the JSON document
_MEASURE_S = 36.0  # of products, shared by the devices: imports and calibration take about ten more


def add_product_options(parser: argparse.ArgumentParser) -> None:
    """Add `--products` and what belongs to it."""
    parser.add_argument("--products", action="store_true", help="measure and predict products of matrices: a minute")
    parser.add_argument("--sizes", type=_sizes, metavar="16,32,…", help="n of the n×n products; else 16 to 4,096")
    parser.add_argument("--cards", metavar="t4,l4,…", help=f"to predict; else {CARDS}; `all` for every known one")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="the picture; else in outputs/hardware/<time>")


def _sizes(text: str) -> list[int]:
    return sorted({int(number(1, 10**6, int)(word)) for word in text.split(",")})


def picture(text: str) -> Path:
    """The type of an argument: a file that a picture can be written to."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"takes a file that ends with .png, .svg or .pdf, got {text!r}")
    return Path(text)


def check_product_options(options: argparse.Namespace) -> list[Datasheet]:
    """The cards to predict. Raises UserError for an unknown one, and for an option that needs `--products`."""
    for name in ("sizes", "cards", "plot"):
        if getattr(options, name) is not None and not options.products:
            raise UserError(f"--{name}: belongs to --products", exit_code=2)
    return find_cards(CARDS if options.cards is None else options.cards, "--cards")


def show_products(known: Sequence["Calibration"], options: argparse.Namespace, cards: Sequence[Datasheet]) -> None:
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
        print("\n".join([*wrapped([head]), "", table(lines).to_string(), "", *wrapped(notes)]))
    draw("draw_products", lines, place, sentence(lines), options.json)


def draw(name: str, lines: Sequence[Any], path: Path, sentence: str, to_stderr: bool, **known: str) -> None:
    """Draw one of the pictures with what else is known of it, and say in a sentence what it shows, and where it is. Raises WriteError."""
    from ..analysis import plots  # matplotlib takes a second to import
    from ..choice import pictures

    with writing("--plot", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, plots.saved(getattr(pictures, name)(lines, **known), path.stem, path.suffix[1:]))
    text = "\n".join(["", *wrapped(filter(None, [sentence])), f"picture  {path}"])
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)
