"""Runs → one table, one plot set, one recommendation.

    python -m batchscope.report outputs/sweeps/<sweep>
    python -m batchscope.report outputs/sweeps/<one> outputs/sweeps/<another> --out outputs/compared

Any folders will do: every run.json in and below them is read, and nothing else is needed. The report goes to
<first folder>/report.
"""

import argparse
import sys
from pathlib import Path

from ..errors import exit_on_user_error, refuse_in_one_line


def main() -> None:
    """The program: parse, report, print. The exit code is 1 if there is nothing to report or every run failed."""
    exit_on_user_error(_main)


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m batchscope.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    refuse_in_one_line(parser)
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="a sweep's folder, or a run's")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes")
    args = parser.parse_args()

    from ..analysis import write_report

    report = write_report(args.folders, args.out or _home(args.folders) / "report")
    print(report.text)
    print(f"\nreport   {report.files[0]}", flush=True)
    sys.exit(report.exit_code)


def _home(folders: list[Path]) -> Path:
    """The first folder that is there: a report never makes a folder that a user misspelt."""
    return next((folder for folder in folders if folder.is_dir()), folders[0])


if __name__ == "__main__":
    main()
