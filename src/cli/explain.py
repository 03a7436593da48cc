"""`batchscope explain`: where the time of a training step goes, operation by operation.

    batchscope explain outputs/runs/<run>                # as the run's record says
    batchscope explain last                              # the newest run in outputs/runs
    batchscope explain outputs/runs/<run> data.batch_size=64
    batchscope explain model=cnn data=mnist              # without a run

A new training of some steps is measured; the run's weights are not needed, and nothing is tested, logged or kept. The
folder `explain` in the run's folder gets explain.json and a trace for https://ui.perfetto.dev.
The dataset is only read where the record says. What a record alone cannot decide has to be typed (security.md in the
documentation).
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpointing import resume
from ..checkpointing.signals import exit_on_signals
from ..errors import UserError, warn
from ..files import refuse_links, why, write_folder
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_explanation
from ..options.compose import apply_overrides, check_command_line
from ..options.overrides import parse
from ..records.explanation import FILE, TRACE, Explanation
from ..records.read import FILE as RECORD
from ..records.read import read
from ..records.values import at, table
from ..records.values import number as number_in
from . import command_parser, folder_of, folders_and_options, number

_NAME = "explain"  # of the folder


class _Task(NamedTuple):
    """What is to be explained."""

    config: dict[str, Any]  # checked
    choices: dict[str, str]
    folder: Path  # to write to
    notes: list[str]
    record: Mapping[str, Any]  # of the run, where this measures the same again; else empty


def main() -> None:
    """The program: parse, measure, write, print."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it when torch is imported
    args = _parser().parse_intermixed_args()
    task = _task(args)
    exit_on_signals()
    try:
        _explain(task, args)
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code > 128:
            name = signal.Signals(stop.code - 128).name
            print(f"\nexplain: stopped by {name}; nothing was written", file=sys.stderr, flush=True)
        raise


def _parser() -> argparse.ArgumentParser:
    parser, whole = command_parser("explain", __doc__), number(1, 10**6, int)
    words = "a run's folder, and options as in batchscope train"
    parser.add_argument("words", nargs="*", metavar="folder or option=value", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write to this folder")
    parser.add_argument("--depth", type=whole, metavar="N", help="show modules to this depth, with what they contain")
    parser.add_argument("--steps", type=whole, default=10, metavar="N", help="time so many steps (10)")
    parser.add_argument("--warmup", type=whole, default=10, metavar="N", help="leave out so many steps before (10)")
    return parser


def _task(args: argparse.Namespace) -> _Task:
    """What the command line asks for. Raises UserError; nothing has been written by then, and torch is not imported."""
    folders, overrides = folders_and_options(args.words)
    if len(folders) > 1:
        raise UserError(f"explain: takes one run; got {' and '.join(folders)}", exit_code=2)
    typed = {word.key_or_group: word.value() for word in parse(overrides) if word.key_or_group in ("model", "data")}
    choices = {group: str(choice) for group, choice in typed.items() if isinstance(choice, str)}
    if folders:
        return _of_run(resume.run_folder(folders[0], "explain"), overrides, choices, args.out)
    (config,) = check_command_line(overrides, False)
    return _Task(check_config(for_explanation(config)), choices, args.out or folder_of(_NAME), [], {})


def _of_run(run_dir: Path, overrides: list[str], chosen: dict[str, str], out: Path | None) -> _Task:
    """The task that a run's record describes, with the options that change it."""
    file = os.path.relpath(run_dir / RECORD)
    record = read(run_dir)
    recorded = check_config(resume.recorded_config(record, run_dir))
    config = check_config(for_explanation(check_config(apply_overrides(recorded, overrides))))
    config, said = trust.only_read(config, overrides, file)
    trust.confirm(config, said, file, run_dir=None)
    if out is None:
        refuse_links(run_dir, written=(f"{_NAME}*", f".{_NAME}*"))
    choices = {key: value for key, value in record.get("choices", {}).items() if value is not None} | chosen
    notes, processes = [], record.get("processes")
    if isinstance(processes, int) and processes > 1:
        notes = [f"the run used {processes} processes; one of them is explained, without communication"]
    is_same = not notes and all(word.startswith("data.root=") for word in overrides)
    return _Task(config, choices, out or run_dir / _NAME, notes, record if is_same else {})


def _explain(task: _Task, args: argparse.Namespace) -> None:
    """Measure, write, print."""
    from ..callbacks._operation_table import explanation_text
    from ..training.explain import explain

    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        step, files = explain(task.config, task.choices, str(task.folder), args.warmup, args.steps)
    step = _reconciled(replace(step, notes=[*task.notes, *step.notes]), task.record)
    folder = None
    try:
        folder = write_folder(task.folder, {**files, FILE: json.dumps(step.to_dict(), indent=1).encode()})
    except OSError as error:
        warn(f"{task.folder} cannot be written ({why(error)}): nothing is kept but what is printed here")
    if args.json:
        print(json.dumps({**step.to_dict(), "folder": folder and str(folder)}, indent=1))
        return
    print(explanation_text(step, args.depth))
    if folder is not None:
        print(f"\nexplain  {folder / FILE}")
        if TRACE in files:
            print(f"trace    {folder / TRACE} (for https://ui.perfetto.dev)")


def _reconciled(step: Explanation, record: Mapping[str, Any]) -> Explanation:
    """The explanation without a verdict where it has another one than the run's record, which may be anybody's."""
    from ..hardware.bottleneck import UNCLEAR
    from ..hardware.evidence import limit_row

    new, old = step.bottleneck, table(at(record, "throughput.bottleneck"))
    is_said = all(trust.is_text(old.get(key)) for key in ("kind", "certainty", "evidence"))
    if not new or not is_said or number_in(old.get("share")) is None:
        return step
    # An unclear verdict contradicts none, and another machine has other limits.
    if new["kind"] in (UNCLEAR, old["kind"]) or old["kind"] == UNCLEAR:
        return step
    if at(record, "hardware.device_name") != step.device_name:
        return step
    evidence = f"these steps say {limit_row(new)[1]}, the run's record says {limit_row(old)[1]}"
    return replace(step, bottleneck={**new, "kind": UNCLEAR, "certainty": UNCLEAR, "evidence": evidence})
