"""`batchscope compare`: is B slower than A, and what differs between them?

    batchscope compare outputs/runs/<one> outputs/runs/<other>
    batchscope compare outputs/runs/<one> outputs/runs/<other> --max-slowdown 10%
    batchscope compare <a> <b> --rerun                # runs both again, side by side: an hour differs from the next
    batchscope compare <a> <b> --rerun --python-b ../other/.venv/bin/python

A and B are each the folder of a run, or of a run that was repeated with other seeds. The exit code is 3 if B is shown to
be slower than --max-slowdown allows. Other programs' load widens the intervals. In the documentation, batch-size.md
says what the intervals hold, and how to use this in a project's CI.
"""

import argparse
import sys
from pathlib import Path

from ..errors import UserError
from ..files import refuse_existing
from . import command_parser, default_folder, fraction, number

_RERUN_FLAGS = ("passes", "seconds", "python_a", "python_b", "out")


def main() -> None:
    """The program: parse, run both again if asked, compare, print."""
    parser = _parser()
    args = parser.parse_intermixed_args()
    flags = [name for name in _RERUN_FLAGS if getattr(args, name) != parser.get_default(name)]
    if flags and not args.rerun:
        raise UserError(f"--{flags[0].replace('_', '-')}: is for --rerun, which runs both again", exit_code=2)
    if args.overrides and not args.rerun:
        hint = "options are for --rerun"
        raise UserError(f"compare: takes two folders; got {args.overrides[0]!r}, and {hint}", exit_code=2)
    if args.out:
        refuse_existing("--out", args.out)
    from ..analysis.compare import Comparison  # imports numpy

    folders = [args.a, args.b]
    if args.rerun:
        from ..sweep.rerun import rerun

        out, pythons = args.out or default_folder("compare"), (args.python_a, args.python_b)
        folders = rerun(folders, out, args.passes, args.seconds, pythons, args.overrides, args.max_slowdown)
    answer = Comparison(*folders, max_slowdown=args.max_slowdown)
    print(answer.text, flush=True)
    sys.exit(answer.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("compare", __doc__)
    parser.add_argument("a", type=Path, metavar="A", help="folder of a run, or of its repeats")
    parser.add_argument("b", type=Path, metavar="B", help="folder of a run, or of its repeats")
    parser.add_argument("overrides", nargs="*", default=[], metavar="option=value", help="with --rerun: changes both")
    slower = "share by which B may be slower than A (5%%)"
    parser.add_argument("--max-slowdown", type=fraction, default=0.05, metavar="SHARE", help=slower)
    again = parser.add_argument_group("run both again, side by side")
    again.add_argument("--rerun", action="store_true", help="run both again, and compare the new runs")
    again.add_argument("--passes", type=number(5, 1000, int), default=15, metavar="N", help="pairs at most (15)")
    again.add_argument("--seconds", type=number(0.1, 3600), default=2.0, metavar="S", help="of training in a run (2)")
    python = "the Python that runs this side, such as that of another checkout's environment"
    again.add_argument("--python-a", default=sys.executable, metavar="PATH", help=python)
    again.add_argument("--python-b", default=sys.executable, metavar="PATH", help=python)
    again.add_argument("--out", type=Path, metavar="DIR", help="folder of the new runs")
    return parser
