"""`batchscope run`: any Lightning script, unchanged, with the monitors on each of its Trainers.

    batchscope run train_theirs.py --their --flags
    batchscope run --vary=--batch-size=16,64,256 train_theirs.py --epochs 2

The options of batchscope stand before the script. The first fit leaves a run folder with run.json, which batchscope
report, compare and choose read; a second fit of the same process has a folder of its own. A script that runs no fit is
said to be unmeasured. --vary runs the script once for each value of one of its flags, ends each run when its speed is
known (--whole: when it ends by itself), and reports. The exit code is 1 if a value failed; one that did not fit into
memory is a result. Ctrl-C, SIGTERM or SIGHUP ends the running script first; a second Ctrl-C or SIGTERM, more than 0.3 s
later, kills it.
"""

import argparse
import functools
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attached import FOLDER, PARENT, UNTIL_KNOWN, VARIED
from ..errors import UserError, printable, warn
from ..files import refuse_existing
from ..records.read import read
from . import command_parser, folder_of

if TYPE_CHECKING:
    from ..sweep.script import ScriptProcess

_NOT_MEASURED = "not measured: the script ran no fit of a lightning.pytorch Trainer"


def main() -> None:
    """The program: parse, then run the script in this process, or once for each value in processes of their own."""
    args = _parser().parse_args()
    if not os.path.isfile(args.script):
        takes = "which is not a file; the options of batchscope stand before the script"
        raise UserError(f"run: got '{args.script}', {takes}")
    folder = args.out or folder_of("sweeps" if args.vary else "scripts")
    flag, values = _varied(args.vary) if args.vary else ("", [])
    refuse_existing("--out", folder)
    if values:
        sys.exit(_run_each(args, folder, flag, values))
    descriptor = os.environ.pop(PARENT, "")
    if descriptor:
        os.set_inheritable(int(descriptor), False)
        threading.Thread(target=_end_with_parent, args=(int(descriptor),), daemon=True).start()
    folder = folder.absolute()  # the script may change the current one
    os.environ[FOLDER] = str(folder)
    sys.argv = [args.script, *args.flags]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    try:
        runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if not descriptor and not os.path.isdir(folder):  # `--vary` says it itself
        warn(f"run: {_NOT_MEASURED}")


def _end_with_parent(descriptor: int) -> None:
    """End this script and its workers, which are a group of their own, when the command that started it ends."""
    os.read(descriptor, 1)  # nothing is written there
    os.killpg(os.getpgrp(), signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("run", __doc__)
    parser.add_argument("--vary", metavar="FLAG=VALUES", help="a flag of the script with several values")
    parser.add_argument("--whole", action="store_true", help="with --vary: let each run end by itself")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of the run, or of the runs and a report")
    parser.add_argument("script", help="a Python file that trains with Lightning")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the script").required = False
    return parser


def _varied(text: str) -> tuple[str, list[str]]:
    """`--batch-size=16,64` as the flag and its values."""
    flag, _, listed = text.partition("=")
    values = listed.split(",")
    if not flag.startswith("-") or "" in values or len(set(values)) < len(values):
        raise UserError(f"--vary: got '{text}', takes a flag with different values: --vary=--batch-size=16,64,256")
    return flag, values


def _run_each(args: argparse.Namespace, folder: Path, flag: str, values: list[str]) -> int:
    """Run the script for each value, one after the other, and report; 1 if a value failed or nothing was measured.

    Raises:
        SystemExit: once the running script has ended, if a signal has come.
    """
    from ..sweep.process import Processes
    from ..sweep.script import ScriptProcess

    environ = {**os.environ, VARIED: flag, **({} if args.whole else {UNTIL_KNOWN: "1"})}
    failures = 0
    with Processes() as processes:
        for number, value in enumerate(values):
            place = folder / str(number)
            print(f"\n— run {number + 1} of {len(values)}: {flag}={value}", flush=True)
            program = [sys.executable, "-P", "-m", "batchscope", "run", f"--out={place}", args.script]
            command = [*program, *args.flags, f"{flag}={value}"]
            process = processes.add(functools.partial(ScriptProcess, command, environ, place, PARENT))
            process.wait()
            processes.exit_if_stopped()
            ending, is_failure = _ending(process)
            failures += is_failure
            if ending:
                print(f"  {printable(ending)}", file=sys.stderr, flush=True)
    if not os.path.isdir(folder):
        raise UserError("run: nothing was measured")
    from ..analysis import write_report

    report = write_report([folder], folder / "report")
    print(report.printed, flush=True)
    return 1 if failures else report.exit_code


def _ending(process: "ScriptProcess") -> tuple[str, bool]:
    """How a script has ended, in words that are empty where all of its fits finished; and whether that is a failure."""
    try:
        records = [read(folder) for folder in process.fits()]
    except UserError as error:
        return str(error), True
    failed = [record for record in records if record.get("status") not in ("finished", "out_of_memory")]
    if records and records[-1].get("status") == "out_of_memory":  # a result, as in every sweep, whatever follows it
        return _status_words(records[-1]), False
    if process.code:
        return f"failed with exit code {process.code}" if process.code > 0 else process.how, True
    if not records:
        return _NOT_MEASURED, True
    return (_status_words(failed[0]), True) if failed else ("", False)


def _status_words(record: Mapping[str, Any]) -> str:
    """`failed: ValueError: …`, of a run's record."""
    error, status = record.get("error"), str(record.get("status")).replace("_", " ")
    return f"{status}: {error}" if error else status
