"""`batchscope report`: a table, plots and a recommendation, of one or several folders of runs.

    batchscope report outputs/sweeps/<sweep>
    batchscope report outputs/sweeps/<one> outputs/sweeps/<another> --out outputs/compared

Every run.json in and below the folders is read. The report on one folder is written to <folder>/report, one on several
to the folder that --out names. Of the folder of a diagnosis (experiment=diagnose) it is the diagnosis's own table.
"""

import sys
from pathlib import Path

from ..errors import UserError
from . import command_parser, fraction


def main() -> None:
    """Parse the command line, write and print the report. Exit code 1 if no run was found, finished or measured."""
    parser = command_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="of a sweep or a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the report")
    enough = "of the best rate that a batch size is to reach (90%%)"
    parser.add_argument("--enough", type=fraction, metavar="SHARE", help=enough)
    margin = "by which a size may train worse than the best (1 point of an accuracy, or a third of the best error)"
    parser.add_argument("--margin", type=fraction, metavar="SHARE", help=margin)
    args = parser.parse_args()
    asked = {option: share for option in ("enough", "margin") if (share := getattr(args, option)) is not None}
    for option, share in asked.items():
        if not 0 < share <= 1:
            raise UserError(f"--{option}: takes a share above 0 %, at most 100 %", exit_code=2)

    if len(args.folders) > 1 and not args.out:  # one on several folders never replaces that on one of them
        raise UserError("--out: is missing; a report on several folders has a folder of its own", exit_code=2)

    from ..analysis import write_report
    from ..analysis.diagnose import holds_one_diagnosis, write_diagnosis

    folder = args.folders[0]
    is_diagnosis = len(args.folders) == 1 and holds_one_diagnosis(folder)
    if is_diagnosis:
        for option in asked:
            raise UserError(f"--{option}: is for batch sizes, and {folder} holds a diagnosis", exit_code=2)
    if is_diagnosis:
        findings = write_diagnosis(folder, args.out)
        print(findings.text, flush=True)
        sys.exit(int(not findings.baseline.rate))
    report = write_report(args.folders, args.out or folder / "report", **asked)
    print(report.printed, flush=True)
    sys.exit(report.exit_code)
