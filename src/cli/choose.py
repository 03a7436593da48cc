"""`batchscope choose`: which device to train on: this one or another, by time, money and memory.

    batchscope choose model=cnn data=mnist                       # after a short measurement here
    batchscope choose outputs/sweeps/<sweep> --epochs 20         # from the records of a sweep over batch sizes
    batchscope choose <sweep> --deadline 2h --budget 5 --price t4=0.5/h --price h100=2.5/h
    batchscope choose model=torchvision model.name=resnet50 data=cifar10 --devices t4,l4,a100,h100

Devices that are here are measured; the others are predicted from them, with an interval, or bounded. A device that is not
here is rented, or has to be started: --start-up says how long that takes. Prices are yours: none is built in.
In the documentation, choosing-a-device.md leads through three cases.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..choice import money
from ..choice.catalogue import device_names, find_device
from ..choice.device import Device
from ..choice.rows import START_UP_S, Question, Target
from ..choice.words import one_time
from ..errors import UserError, exit_on_user_error, reraise_in_hydra
from ..files import why, write_folder
from ..options.compose import check_command_line
from ..options.groups import use_config_dir
from ..options.overrides import accept_null_groups
from ..records.formatting import option_value
from . import add_config_dir, command_parser

if TYPE_CHECKING:
    from ..choice.choose import Choice
    from ..choice.step import Workload

KINDS = ("cpu", "cuda", "mps", "rocm")  # what a device that is here is called
USUAL = ("t4", "l4", "a10", "a100", "l40s", "h100", "rtx4090")  # that people rent or own
_OWN = Path("outputs") / "choose"
_NAME = "choice"  # of the files


def main() -> None:
    """The program: parse, measure if no folder is given, choose, print."""
    exit_on_user_error(_main)


def _main() -> None:
    args = _parser().parse_intermixed_args()
    reraise_in_hydra()
    folders = [word for word in args.words if _is_folder(word)]
    overrides = [word for word in args.words if word not in folders]
    if not args.words:
        raise UserError("choose: takes the folder of a sweep, or options such as model=cnn data=mnist", exit_code=2)
    if folders and overrides:
        raise UserError(
            f"choose: takes folders or options; got {folders[0]} and {overrides[0]}: what was measured in a folder stays "
            "as it was",
            exit_code=2,
        )
    if folders and args.config_dir is not None:
        raise UserError("--config-dir: is for a measurement, without a folder", exit_code=2)
    use_config_dir(args.config_dir)
    prices = _prices(args)
    targets = _targets(args.devices, prices)
    epochs, places = _measured(overrides, args) if overrides else (None, [Path(folder) for folder in folders])
    from ..choice.choose import choose

    workloads, own_epochs = _workloads(places)
    question = _question(args, prices, epochs or own_epochs)
    found = choose(workloads, targets, question)
    print(json.dumps(found.as_json(), indent=1, ensure_ascii=False) if args.json else found.text(), flush=True)
    if overrides:
        print(f"\nmeasured {places[0].parent}", file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.out is not None:  # last, so that a folder that cannot be written takes nothing away
        folder = _write(args.out, found)
        if not args.json:
            print(f"\nplot     {folder / f'{_NAME}.png'}\ntable    {folder / f'{_NAME}.md'}")


def _is_folder(word: str) -> bool:
    """Whether a word is a folder and no option. The name of a folder may hold an equals sign."""
    return os.path.exists(word) or ("=" not in word and not word.startswith("~"))


def _prices(args: argparse.Namespace) -> money.Prices:
    """The prices by the name of the device, or by `cpu` and the like for a device that is here."""
    file = money.read_prices(args.prices) if args.prices is not None else None
    return money.collect(
        args.price, file, args.budget, lambda name: name if name in KINDS else _find(name, "--price").name
    )


def _targets(names: Sequence[str] | None, prices: money.Prices) -> list[Target]:
    """The devices to compare with: those that the user names, or the usual ones and those with a price."""
    if names is None:
        priced = [device for device in prices.per_hour if device not in KINDS]
        names = [*USUAL, *priced]
    wanted = device_names() if list(names) == ["all"] else names
    devices = {device.name: device for device in (_find(name, "--devices") for name in wanted)}
    return [Target(_label(device), device) for device in devices.values()]


def _find(name: str, option: str) -> Device:
    """The device of this name; the error names the option."""
    if re.match(r"\d+ ?[x×]", name):
        raise UserError(f"{option}: got {name!r}, takes single devices: several of one kind are not predicted")
    if name.lower() in KINDS:
        raise UserError(f"{option}: {name} is a device of this machine, which is in the table if it was measured")
    try:
        return find_device(name)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error


def _label(device: Device) -> str:
    """The short name of a device."""
    return next(name for name in device_names() if find_device(name).name == device.name)


def _question(args: argparse.Namespace, prices: money.Prices, known: int | None) -> Question:
    epochs, source = args.epochs or known or 1, "" if args.epochs else "trainer.max_epochs"
    return Question(
        epochs=epochs,
        epochs_from=source if args.epochs or known else "no record says how many; --epochs does",
        deadline=args.deadline,
        budget=args.budget and args.budget.value,
        prices=prices,
        start_up=args.start_up,
        batch_size=args.batch_size,
        host=args.host,
        precision=args.precision,
    )


def _measured(overrides: list[str], args: argparse.Namespace) -> tuple[int | None, list[Path]]:
    """Measure the training that options describe: its epochs, and the folders of its runs."""
    from ..sweep.process import exit_on_signals
    from ..sweep.sizes import measure, own_sizes

    overrides, sizes = own_sizes(accept_null_groups(overrides))
    config = check_command_line(overrides, False)[0]
    trainer = config["trainer"]
    if trainer.get("devices") not in (1, "auto") or trainer.get("num_nodes") not in (1, None):
        raise UserError("trainer.devices: choose compares single devices; leave it at 1")
    from ..hardware.devices import available, check_accelerator  # torch takes seconds to import

    asked = trainer.get("accelerator", "auto")
    check_accelerator(asked)
    kinds = [kind for kind in available() if asked in ("auto", kind) or (asked == "gpu" and kind != "cpu")]
    exit_on_signals()
    folder = _OWN / time.strftime("%Y-%m-%d_%H-%M-%S")
    places = measure(overrides, sizes, kinds, folder, _say)
    epochs = trainer.get("max_epochs")
    return epochs if isinstance(epochs, int) and epochs > 0 else None, places


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _workloads(folders: Sequence[Path]) -> tuple[list["Workload"], int | None]:
    """What was measured on each device, and how many epochs the runs were to train, where they say so."""
    from ..choice.step import workloads

    found = [each for folder in folders for each in workloads(folder)]
    if len(titles := sorted({each.title for each in found})) > 1:
        raise UserError(f"choose: takes one training; the folders have {' and '.join(titles)}")
    for key in dict.fromkeys(key for each in found for key in each.options):
        if len(values := list(dict.fromkeys(option_value(each.options.get(key)) for each in found))) > 1:
            raise UserError(f"choose: takes one training; the folders have {key}={' and '.join(values)}")
    if len({each.device.name for each in found}) < len(found):
        raise UserError("choose: several folders were measured on the same device; give one for each device")
    epochs = {each.epochs for each in found}
    return found, epochs.pop() if len(epochs) == 1 else None


def _write(folder: Path, found: "Choice") -> Path:
    """Write the table, the plot and the numbers; where that cannot be done, one line says so."""
    from ..choice.plot import choice_png  # matplotlib takes a second to import

    plot = choice_png(found.rows, found.question, found.title, found.recommendation.label)
    files = {
        f"{_NAME}.md": found.markdown().encode(),
        f"{_NAME}.png": plot,
        f"{_NAME}.json": json.dumps(found.as_json(), indent=1, ensure_ascii=False).encode(),
    }
    try:
        return write_folder(folder, files)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be written: {why(error)}") from error


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("choose", __doc__)
    parser.add_argument(
        "words", nargs="*", metavar="folder or option=value", help="of a sweep, or options as in batchscope train"
    )
    parser.add_argument("--devices", type=_names, metavar="t4,l4,…", help="to compare with; `all` for every known one")
    parser.add_argument("--epochs", type=_epochs, metavar="N", help="to train (the run's own trainer.max_epochs, or 1)")
    parser.add_argument("--deadline", type=_typed(money.seconds), metavar="2h", help="the training has to end by then")
    parser.add_argument("--budget", type=_typed(money.amount), metavar="5", help="to pay at most")
    parser.add_argument(
        "--price",
        type=_typed(money.price),
        action="append",
        default=[],
        metavar="h100=2.5/h",
        help="of a device; several",
    )
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML with prices, their source and their date")
    parser.add_argument(
        "--start-up",
        type=_typed(money.seconds_or_0),
        default=START_UP_S,
        metavar="5min",
        help=f"of a device that is not here ({one_time(START_UP_S)}, an assumption)",
    )
    parser.add_argument(
        "--batch-size", type=_size, metavar="N", help="the same for every device; else each has its best"
    )
    parser.add_argument("--precision", metavar="bf16-mixed", help="of the predictions; else that of the measurement")
    parser.add_argument(
        "--host", metavar="slow", help="processor beside a GPU: fast, typical, slow, or 7us an operation"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the table, the plot and the numbers there")
    add_config_dir(parser, "; without a folder")
    return parser


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that raises ValueError, as the type of an argument: argparse prints the error's own words."""

    def typed(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def _whole(text: str, most: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()) or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"takes a whole number from 1 to {most:,}, got {text!r}")
    return int(text)


def _epochs(text: str) -> int:
    return _whole(text, 10**6)


def _size(text: str) -> int:
    return _whole(text, 10**8)


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("takes names of devices, such as t4,l4")
    return found
