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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class _Task:
    """What is to be explained."""

    config: dict[str, Any]  # checked
    choices: dict[str, str]
    folder: Path  # to write to
    notes: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)  # of the run, where this measures the same again


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


def _explain(task: _Task, args: argparse.Namespace) -> None:
    """Measure, write, print."""
    from ..callbacks._operation_table import explanation_text
    from ..training.explain import explain

    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        found, files = explain(task.config, task.choices, str(task.folder), args.warmup, args.steps)
    found = _reconciled(replace(found, notes=[*task.notes, *found.notes]), task.record)
    folder = None
    try:
        folder = write_folder(task.folder, {**files, FILE: json.dumps(found.to_dict(), indent=1).encode()})
    except OSError as error:
        warn(f"{task.folder} cannot be written ({why(error)}): nothing is kept but what is printed here")
    if args.json:
        print(json.dumps({**found.to_dict(), "folder": folder and str(folder)}, indent=1))
        return
    print(explanation_text(found, args.depth))
    if folder is not None:
        print(f"\nexplain  {folder / FILE}")
        if TRACE in files:
            print(f"trace    {folder / TRACE} (for https://ui.perfetto.dev)")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("explain", __doc__)
    words, at_least_one = "a run's folder, and options as in batchscope train", number(1, 10**6, int)
    parser.add_argument("words", nargs="*", metavar="folder or option=value", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write to this folder")
    parser.add_argument(
        "--depth", type=at_least_one, metavar="N", help="show modules to this depth, with what they contain"
    )
    parser.add_argument("--steps", type=at_least_one, default=10, metavar="N", help="time so many steps (10)")
    parser.add_argument(
        "--warmup", type=at_least_one, default=10, metavar="N", help="leave out so many steps before (10)"
    )
    return parser


def _task(args: argparse.Namespace) -> _Task:
    """What the command line asks for. Raises UserError; nothing has been written by then, and torch is not imported."""
    folders, overrides = folders_and_options(args.words)
    if len(folders) > 1:
        raise UserError(f"explain: takes one run; got {' and '.join(folders)}", exit_code=2)
    if folders:
        return _of_run(resume.run_folder(folders[0], "explain"), overrides, args.out)
    (config,) = check_command_line(overrides, False)
    return _Task(check_config(for_explanation(config)), _choices(overrides), args.out or folder_of(_NAME))


def _of_run(run_dir: Path, overrides: list[str], out: Path | None) -> _Task:
    """The task that a run's record describes, with the options that change it."""
    file = os.path.relpath(run_dir / RECORD)
    record = read(run_dir)
    recorded = check_config(resume.recorded_config(record, run_dir))
    config = check_config(for_explanation(check_config(apply_overrides(recorded, overrides))))
    config, said = trust.only_read(config, overrides, file)
    trust.confirm(config, said, file, run_dir=None)
    if out is None:
        refuse_links(run_dir, written=(f"{_NAME}*", f".{_NAME}*"))
    choices = {key: value for key, value in record.get("choices", {}).items() if value is not None}
    task = _Task(config, choices | _choices(overrides), out or run_dir / _NAME)
    processes = record.get("processes")
    if isinstance(processes, int) and processes > 1:
        note = f"the run used {processes} processes; one of them is explained, without communication"
        return replace(task, notes=(note,))
    is_same = all(word.startswith("data.root=") for word in overrides)
    return replace(task, record=record) if is_same else task


def _reconciled(found: Explanation, record: dict[str, Any]) -> Explanation:
    """The explanation without a verdict where it has another one than the run's record; an unclear one contradicts none."""
    from ..hardware.bottleneck import UNCLEAR
    from ..hardware.evidence import limit_row

    new, old = found.bottleneck, _verdict(record)
    if not new or not old or UNCLEAR in (new["kind"], old.get("kind")) or new["kind"] == old.get("kind"):
        return found
    if at(record, "hardware.device_name") != found.device_name:  # another machine has other limits
        return found
    evidence = f"these steps say {limit_row(new)[1]}, the run's record says {limit_row(old)[1]}"
    return replace(found, bottleneck={**new, "kind": UNCLEAR, "certainty": UNCLEAR, "evidence": evidence})


def _verdict(record: dict[str, Any]) -> dict[str, Any]:
    """The bottleneck that a record names; empty where it lacks a word or a number of it, as one from anybody may."""
    found = table(at(record, "throughput.bottleneck"))
    is_said = all(trust.is_text(found.get(key)) for key in ("kind", "certainty", "evidence"))
    return found if is_said and number_in(found.get("share")) is not None else {}


def _choices(overrides: list[str]) -> dict[str, str]:
    """The choices of groups that a command line names."""
    chosen = [one for one in parse(overrides) if one.key_or_group in ("model", "data") and isinstance(one.value(), str)]
    return {one.key_or_group: str(one.value()) for one in chosen}
