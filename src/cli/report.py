"""`batchscope report`: a table, plots and a recommendation, of one or several folders of runs.

    batchscope report outputs/sweeps/<sweep>
    batchscope report outputs/sweeps/<one> outputs/sweeps/<another> --out outputs/compared

Every run.json in and below the folders is read. The report is written to <first folder>/report. Of the folder of a
diagnosis (experiment=diagnose) it is the diagnosis's own table.
"""

import os
import sys
from pathlib import Path

from ..errors import exit_on_user_error
from . import command_parser


def main() -> None:
    """Parse the command line, write the report, print it. The exit code is 1 if no run was found, finished or measured."""
    exit_on_user_error(_main)


def _main() -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="of a sweep or a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the report")
    args = parser.parse_args()

    from ..analysis import write_report
    from ..analysis.diagnose import holds_one_diagnosis

    if len(args.folders) == 1 and holds_one_diagnosis(args.folders[0]):
        from ..sweep.diagnose import report_again

        print(report_again(args.folders[0], args.out))
        return
    # A report does not create a folder that the user misspelt.
    home = next((folder for folder in args.folders if os.path.isdir(folder)), args.folders[0])
    report = write_report(args.folders, args.out or home / "report")
    print(report.printed, flush=True)
    sys.exit(report.exit_code)
