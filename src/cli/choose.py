"""`batchscope choose`: which device to train on, this one or another, by time, memory and price.

    batchscope choose model=cnn data=mnist                       # after a short measurement here
    batchscope choose outputs/sweeps/<sweep> --epochs 20         # from the records of a sweep over batch sizes
    batchscope choose last --epochs 20                           # the newest sweep, or what this command has measured
    batchscope choose <sweep> --price t4=0.5 --price h100=2.5 --start-up 300

Devices that are here are measured; NVIDIA's others are predicted from them, with an interval. What nobody has measured
is an option: how long another device takes to start (--start-up), and what an hour costs (--price).
In the documentation, choosing-a-device.md says how to read the answer.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from ..analysis.run import PRECISIONS as LIGHTNING_PRECISIONS
from ..checkpointing.signals import exit_on_signals
from ..choice.crossing import as_json
from ..choice.device_choice import DeviceChoice
from ..choice.measured import device_here, read_training
from ..choice.rows import Question, check_measured, check_prices
from ..choice.use import use_lines, use_sentence
from ..choice.work import PRECISIONS
from ..errors import UserError, warn
from ..files import as_write_error
from ..hardware.datasheet import find_card, find_cards
from ..options.command_lines import refuse_hydra_options
from ..options.compose import check_command_line, compose
from ..options.overrides import parse, text_of
from ..options.purpose import NO_END
from ..options.ranks import ranks_asked
from ..records.read import sweep_folder
from ..records.terminal import columns, wrapped
from . import command_parser, default_folder, draw, folders_and_options, number, picture

RUNS = Path("outputs/choose")  # measured by this command, each in a folder of its own
DEVICE_KINDS = ("cpu", "cuda", "mps")  # names of devices that are no known card
USUAL = ("t4", "l4", "a10", "a100", "l40s", "h100", "rtx4090")  # cards that people rent or own
SCHEMA = 5  # of the JSON document


def main() -> None:
    """The program: parse, measure if no folder is given, choose, print."""
    args = _parser().parse_intermixed_args()
    folders, overrides = folders_and_options(args.words)
    if not args.words:
        raise UserError("choose: takes the folder of a sweep, or options such as model=cnn data=mnist", exit_code=2)
    if folders and overrides:
        raise UserError(f"choose: takes folders or options; got {folders[0]} and {overrides[0]}", exit_code=2)
    prices = _parse_prices(args.price)
    names = args.devices or ",".join([*USUAL, *(name for name in prices if name not in DEVICE_KINDS)])
    cards = find_cards(names, "--devices")
    question = Question(cards, args.epochs, args.batch_size, prices, args.start_up, args.precision)
    measured_folders = (
        _measure_options(overrides, question, args.plot)
        if overrides
        else [sweep_folder(name, "choose", RUNS) for name in folders]
    )
    training, left_out = read_training(measured_folders)
    check_prices([source.device for source in training.sources], question)
    choice = DeviceChoice(training, question)
    use = use_lines(training, question) if args.plot else []
    if args.json:
        document = {"schema": SCHEMA, **choice.as_json(), "left_out": left_out}
        document |= {"use": as_json(use, use_sentence(use, args.batch_size))} if use else {}
        print(json.dumps(document, indent=1, ensure_ascii=False), flush=True)
    else:
        notes = "\n".join(wrapped([f"left out: {line}" for line in left_out]))
        print("\n\n".join(filter(None, [choice.text(columns()), notes])), flush=True)
    if overrides:
        print(f"\nmeasured {measured_folders[0].parent}", file=sys.stderr if args.json else sys.stdout, flush=True)
    if use:
        sentence = use_sentence(use, args.batch_size)
        draw("draw_use", use, args.plot, sentence, args.json, subject=training.subject)
    elif args.plot:
        warn("--plot: no device has a size that surely fits")


def _parse_prices(words: list[str]) -> dict[str, float]:
    """Return the price of an hour by the short name of the device."""
    prices = {}
    for word in words:
        name, _, price = word.partition("=")
        name = name if name in DEVICE_KINDS else find_card(name, "--price").short[0]
        if name in prices:
            raise UserError(f"--price: got {word!r}, and {name} has a price already")
        try:
            prices[name] = number(0, 10**9)(price)
        except argparse.ArgumentTypeError:
            raise UserError(f"--price: got {word!r}, takes what an hour of a device costs, such as h100=2.5") from None
    return prices


def _measure_options(overrides: list[str], question: Question, plot: Path | None) -> list[Path]:
    """Measure the training that options describe; return the folders of its runs.

    A question without an answer, and a picture that cannot be written, are refused before the measurement.
    """
    refuse_hydra_options(overrides)
    without_sizes = [text_of(word) for word in parse(overrides) if word.key_or_group != "data.batch_size"]
    composition = compose(without_sizes)  # refuses unknown names before slow imports
    from ..sweep.choose_sweep import measure_on_devices, timed_overrides

    words = timed_overrides(overrides)
    configs = check_command_line(words, multirun=True)
    epochs = composition.trainer.get("max_epochs")  # a timed run does not have it
    config, batch_sizes = configs[0], [config["data"].get("batch_size") for config in configs]
    limits = [key for key in ("max_steps", "max_time") if composition.trainer.get(key) not in (None, -1, NO_END)]
    if limits and not question.epochs:
        raise UserError(
            f"trainer.{limits[0]}: choose measures until a step's time is known, and takes whole epochs; write --epochs"
        )
    if config["compile"]:
        raise UserError("compile: choose predicts by the operations of a step, and a compiled step does not show them")
    sizes = sorted({size for size in batch_sizes if isinstance(size, int)})  # a user's DataModule may take null
    trainer = config["trainer"]
    if len(sizes) < 2 or len(sizes) < len(configs):
        raise UserError(
            "data.batch_size: choose needs several sizes of one training, to tell what a step costs from what a sample "
            "costs; write data.batch_size=32,128, or leave it out"
        )
    several_devices = UserError("trainer.devices: choose compares single devices; leave it at 1")
    is_auto = trainer.get("devices") == "auto" and trainer.get("num_nodes") in (1, None)
    if not is_auto and ranks_asked(config) != 1:
        raise several_devices
    precision = str(trainer.get("precision"))
    precision = LIGHTNING_PRECISIONS.get(precision, precision)
    if precision == "16-mixed" and trainer.get("accelerator") == "cpu":
        precision = "bf16-mixed"  # as Lightning computes it there
    check_measured(question, "the training is to be", sizes, precision)
    import torch  # takes seconds to import

    from ..hardware.devices import available, check_accelerator, device_name

    accelerator = trainer.get("accelerator", "auto")
    check_accelerator(config)
    kinds = [k for k in available() if accelerator in ("auto", k) or (accelerator == "gpu" and k != "cpu")]
    if is_auto and "cuda" in kinds and torch.cuda.device_count() > 1:
        raise several_devices
    if precision == "16-mixed" and len(kinds) > 1:
        kinds.remove("cpu")
        warn("trainer.precision: a CPU computes 16-mixed in bfloat16, which is another training: it is left out")
    index = indices[0] if isinstance(indices := trainer.get("devices"), list) and indices else 0
    devices = [torch.device(kind, index if kind == "cuda" else 0) for kind in kinds]
    check_prices([device_here(device.type, device_name(device)) for device in devices], question)
    if plot:
        with as_write_error("--plot", plot):
            plot.parent.mkdir(parents=True, exist_ok=True)
    exit_on_signals()
    with contextlib.redirect_stdout(sys.stderr):
        return measure_on_devices(words, kinds, default_folder("choose"), question.epochs or epochs)


def _parser() -> argparse.ArgumentParser:
    parser, count = command_parser("choose", __doc__), number(1, 10**8, int)
    words = "folder of a sweep, or options as in batchscope train"
    parser.add_argument("words", nargs="*", metavar="folder or option=value", help=words)
    parser.add_argument("--devices", metavar="t4,l4,…", help="cards to compare with; `all` for every known one")
    epochs = "epochs to train; by default those of the measurement or of the run's trainer.max_epochs, or 1"
    parser.add_argument("--epochs", type=count, metavar="N", help=epochs)
    size = "a measured batch size; by default the largest that all devices can take"
    parser.add_argument("--batch-size", type=count, metavar="N", help=size)
    seconds, start_up = number(0, 10**6), "time until a device elsewhere trains"
    parser.add_argument("--start-up", type=seconds, default=0.0, metavar="SECONDS", help=start_up)
    price = "price of an hour; cpu=0.1 for this machine; may be repeated"
    parser.add_argument("--price", action="append", default=[], metavar="h100=2.5", help=price)
    parser.add_argument("--precision", choices=PRECISIONS, help="of the predictions; else that of the measurement")
    plot = "draws samples/s and MFU against batch size"
    parser.add_argument("--plot", type=picture, metavar="FILE", help=plot)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    return parser
