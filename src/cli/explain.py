"""`batchscope explain`: where the time of a training step goes, operation by operation.

    batchscope explain outputs/runs/<run>                # as the run's record says
    batchscope explain last                              # the newest run in outputs/runs
    batchscope explain outputs/runs/<run> data.batch_size=64
    batchscope explain model=cnn data=mnist              # without a run

A new training of some steps is measured; the run's weights are not needed, and nothing is tested, logged or kept. The
folder `explain` in the run's folder gets explain.json and a trace for https://ui.perfetto.dev.
What a record alone cannot decide has to be typed (security.md in the documentation).
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .._imports import quick_imports
from .._system import relative
from ..checkpointing import resume
from ..checkpointing.signals import exit_on_signals
from ..errors import UserError, is_text, warn
from ..files import refuse_links, why, write_folder
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_explanation
from ..options.compose import apply_overrides, choices_in, compose_command_line
from ..options.groups import DEFAULT_DATA
from ..options.overrides import parse
from ..records.course import course_words
from ..records.explanation import FILE, TRACE
from ..records.read import FILE as RECORD
from ..records.read import read
from ..records.values import at, table
from . import command_parser, folder_of, folders_and_options

_NAME = "explain"  # of the folder


class _Task(NamedTuple):
    """What is to be explained."""

    config: dict[str, Any]  # checked
    choices: dict[str, str]
    folder: Path  # to write to
    notes: list[str]
    record: Mapping[str, Any]  # of the run, where this measures the same again; else empty
    names_data: bool = True  # whether somebody has chosen the data


def main() -> None:
    """The program: parse, measure, write, print."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it when torch is imported
    args = _parser().parse_intermixed_args()
    task = _task(args)
    exit_on_signals()
    _explain(task)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("explain", __doc__)
    words = "a run's folder, and options as in batchscope train"
    parser.add_argument("words", nargs="*", metavar="folder or option=value", help=words)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write to this folder")
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
    line = compose_command_line(overrides, multirun=False)
    composed = choices_in(line.compositions[0].hydra)
    names_data = "data" in choices or composed.get("data") != DEFAULT_DATA
    config = check_config(for_explanation(line.configs[0]))
    return _Task(config, composed | choices, args.out or folder_of(_NAME), [], {}, names_data)


def _of_run(run_dir: Path, overrides: list[str], chosen: dict[str, str], out: Path | None) -> _Task:
    """The task that a run's record describes, with the options that change it."""
    file = relative(run_dir / RECORD)
    record = read(run_dir)
    recorded = check_config(resume.recorded_config(record, run_dir))
    config = check_config(for_explanation(check_config(apply_overrides(recorded, overrides))))
    trust.confirm(config, overrides, file)
    if out is None:
        refuse_links(run_dir, written=(f"{_NAME}*", f".{_NAME}*"))
    choices = {key: value for key, value in record.get("choices", {}).items() if value is not None} | chosen
    notes, processes = [], record.get("processes")
    if isinstance(processes, int) and processes > 1:
        notes = [f"the run used {processes} processes; one of them is explained, without communication"]
        slow = at(record, "throughput.slow_rank.evidence")
        notes += [f"in the run {slow}"] if is_text(slow) else []
    is_same = not notes and all(word.startswith("data.root=") for word in overrides)
    if notes or is_same:
        notes += [f"in the run, {words}" for words in course_words(table(record.get("throughput")))]
    return _Task(config, choices, out or run_dir / _NAME, notes, record if is_same else {})


def _explain(task: _Task) -> None:
    """Measure, write, print."""
    with quick_imports():
        from ..callbacks._explanation import explanation_text
        from ..training.explain import explain

    step, files = explain(task.config, task.choices, task.folder, task.names_data)
    said = table(at(task.record, "throughput.bottleneck"))
    is_here = at(task.record, "hardware.device_name") == step.device_name
    if is_here and not said.get("busy") and all(is_text(said.get(key)) for key in ("kind", "certainty", "evidence")):
        step = replace(step, bottleneck=said)
    step, folder = replace(step, notes=[*task.notes, *step.notes]), None
    try:
        folder = write_folder(task.folder, {**files, FILE: json.dumps(step.to_dict(), indent=1).encode()})
    except OSError as error:
        warn(f"{task.folder} cannot be written whole ({why(error)}); all of it is printed here")
    print(explanation_text(step))
    if folder is not None:
        print(f"\nexplain  {folder / FILE}")
        if TRACE in files:
            print(f"trace    {folder / TRACE} (for https://ui.perfetto.dev)")
