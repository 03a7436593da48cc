"""`batchscope run`: any Lightning script, unchanged, with the monitors on each of its Trainers.

    batchscope run train_theirs.py --their --flags
    batchscope run --out outputs/sizes/16 train_theirs.py --batch-size=16

The options of batchscope stand before the script. The first fit leaves a run folder with run.json, which batchscope
report, compare and choose read; a second fit, also in another process of the script, has a folder of its own. If no fit
leaves a record, a warning says so. The exit code is that of the script.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

from .. import ranks
from ..attached import FOLDER
from ..errors import UserError, warn
from ..files import refuse_existing
from . import command_parser, default_folder


def main() -> None:
    """The program: parse, then run the script in this process."""
    parser = command_parser("run", __doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of the run")
    parser.add_argument("script", help="a Python file that trains with Lightning")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script").required = False
    args = parser.parse_args()
    if not os.path.isfile(args.script):
        takes = "which is not a file; the options of batchscope stand before the script"
        raise UserError(f"run: got '{args.script}', {takes}")
    rank, folder = ranks.current_rank(), args.out or default_folder("scripts")
    if not (args.out or rank.launcher):  # scripts may be started together; the ranks of a launcher share a folder
        folder = Path(f"{folder}-{os.getpid()}")
    refuse_existing("--out", folder)
    folder = folder.absolute()  # the script may change the current folder
    os.environ[FOLDER] = str(folder)
    sys.argv = [args.script, *args.flags]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    try:
        runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if not rank.rank and not os.path.isdir(folder):
        warn("run: nothing was measured: no fit of a lightning.pytorch Trainer has left a record")
