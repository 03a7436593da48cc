"""`batchscope report`: a table, plots and a recommendation, of one or several folders of runs.

    batchscope report outputs/sweeps/<sweep>
    batchscope report outputs/sweeps/<one> outputs/sweeps/<another> --out outputs/compared

Every run.json in and below the folders is read. The report on one folder is written to <folder>/report, one on several
to outputs/reports/<name>+<name>.
"""

import sys
from pathlib import Path

from ..errors import UserError
from . import command_parser

_LONGEST = 120  # characters of a folder's name


def main() -> None:
    """Parse the command line, write and print the report. Exit code 1 if no run was found, finished or measured."""
    parser = command_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="of a sweep or a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the report")
    args = parser.parse_args()
    from ..analysis import analyse, write_report

    out = args.out or args.folders[0] / "report"
    if len(args.folders) > 1 and not args.out:  # one on several folders never replaces that on one of them
        names = [path.resolve().name or "root" for path in args.folders]
        out = Path("outputs/reports") / "+".join(names)[:_LONGEST]
    try:
        report = write_report(args.folders, out)
    except UserError as error:  # its files cannot be written
        print(analyse(args.folders).text, flush=True)
        raise UserError(f"{error}; --out names another folder") from error
    print(report.printed, flush=True)
    sys.exit(report.exit_code)
