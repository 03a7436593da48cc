"""`batchscope choose`: which device to train on: this one or another, by time, money and memory.

    batchscope choose model=cnn data=mnist                       # after a short measurement here
    batchscope choose outputs/sweeps/<sweep> --epochs 20         # from the records of a sweep over batch sizes
    batchscope choose <sweep> --deadline 2h --budget 5 --price t4=0.5/h --price h100=2.5/h
    batchscope choose model=torchvision model.name=resnet50 data=cifar10 --devices t4,l4,a100,h100

Devices that are here are measured; the others are predicted from them, with an interval, or bounded. A device that is not
here is rented, or has to be started: --start-up says how long that takes. Prices are yours: none is built in.
docs/choosing-a-device.md leads through three cases.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..choice import money
from ..choice.rows import START_UP_S, Question, Target
from ..choice.words import one_time
from ..errors import UserError, exit_on_user_error, reraise_in_hydra
from ..files import why, write_folder
from . import command_parser

_OWN = Path("outputs") / "choose"
_NAME = "choice"  # of the files
_MOST_EPOCHS = 10**6


def main() -> None:
    """The program: parse, measure if no folder is given, choose, print."""
    exit_on_user_error(_main)


def _main() -> None:
    args = _parser().parse_intermixed_args()
    reraise_in_hydra()
    print(args)


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
        "--price", type=_typed(money.price), action="append", default=[], metavar="h100=2.5/h", help="of a device; several"
    )
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML with prices, their source and their date")
    parser.add_argument(
        "--start-up",
        type=_typed(money.seconds_or_0),
        default=START_UP_S,
        metavar="5min",
        help=f"of a device that is not here ({one_time(START_UP_S)}, an assumption)",
    )
    parser.add_argument("--batch-size", type=_size, metavar="N", help="the same for every device; else each has its best")
    parser.add_argument("--precision", metavar="bf16-mixed", help="of the predictions; else that of the measurement")
    parser.add_argument("--host", metavar="NAME", help="the processor beside a GPU that is not here")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the table, the plot and the numbers there")
    parser.add_argument("--config-dir", metavar="DIR", help="adds YAML files of your own; without a folder")
    return parser
