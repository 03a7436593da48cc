"""`batchscope report`: a table, plots and a recommendation, of one or several folders of runs.

    batchscope report outputs/sweeps/<sweep>
    batchscope report outputs/sweeps/<one> outputs/sweeps/<another> --out outputs/compared

Every run.json in and below the folders is read. The report on one folder is written to <folder>/report, one on several
to the folder that --out names.
"""

import sys
from pathlib import Path

from ..errors import UserError
from . import command_parser


def main() -> None:
    """Parse the command line, write and print the report. Exit code 1 if no run was found, finished or measured."""
    parser = command_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="of a sweep or a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the report")
    args = parser.parse_args()
    if len(args.folders) > 1 and not args.out:  # one on several folders never replaces that on one of them
        raise UserError("--out: is missing; a report on several folders has a folder of its own", exit_code=2)

    from ..analysis import write_report

    report = write_report(args.folders, args.out or args.folders[0] / "report")
    print(report.printed, flush=True)
    sys.exit(report.exit_code)
