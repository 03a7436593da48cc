"""`batchscope explain`: where the time of a training step goes, operation by operation.

    batchscope explain outputs/runs/<run>                # as the run's record says
    batchscope explain last                              # the newest run in outputs/runs
    batchscope explain outputs/runs/<run> data.batch_size=64
    batchscope explain model=cnn data=mnist              # without a run

A new training of some steps is measured; the run's weights are not needed, and nothing is tested, logged or kept. The
folder `explain` in the run's folder gets explain.json and a trace for https://ui.perfetto.dev.
What a record alone cannot decide has to be typed (security.md in the documentation).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._imports import quick_imports
from .._system import relative
from ..checkpointing import resume
from ..checkpointing.signals import exit_on_signals
from ..errors import UserError, is_text
from ..files import as_write_error, refuse_existing, refuse_links, write_folder
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_explanation, refuse_hydra_options
from ..options.compose import apply_overrides, choices_after, choices_in, compose_command_line
from ..options.groups import DEFAULT_DATA
from ..options.overrides import options_and_groups
from ..records.course import course_words
from ..records.explanation import FILE, TRACE
from ..records.read import FILE as RECORD
from ..records.read import read
from ..records.values import at, table
from . import command_parser, default_folder, folders_and_options

_FOLDER = "explain"  # the folder's name


def main() -> None:
    """The program: parse, measure, print, write."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it when torch is imported
    parser = command_parser("explain", __doc__)
    words = "a run's folder, and options as in batchscope train"
    parser.add_argument("words", nargs="*", metavar="folder or option=value", help=words)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write to this new folder")
    args = parser.parse_intermixed_args()
    folders, overrides = folders_and_options(args.words)
    if len(folders) > 1:
        raise UserError(f"explain: takes one run; got {' and '.join(folders)}", exit_code=2)
    if args.out is not None:
        refuse_existing("--out", args.out)
    if folders:
        _explain_run(resume.run_folder(folders[0], "explain"), overrides, args.out)
        return
    refuse_hydra_options(overrides)
    line = compose_command_line(overrides, multirun=False)
    choices = choices_in(line.compositions[0].hydra)
    names_data = "data" in options_and_groups(overrides)[1] or choices.get("data") != DEFAULT_DATA
    config = check_config(for_explanation(line.configs[0]))
    _explain(config, choices, args.out or default_folder(_FOLDER), names_data=names_data)


def _explain_run(run_dir: Path, overrides: list[str], out: Path | None) -> None:
    """Explain the training that a run's record describes, changed by overrides."""
    file = relative(run_dir / RECORD)
    record = read(run_dir)
    recorded = check_config(resume.recorded_config(record, run_dir))
    config = check_config(for_explanation(check_config(apply_overrides(recorded, overrides))))
    trust.refuse_unconfirmed(config, overrides, file)
    if out is None:
        refuse_links(run_dir, written=(f"{_FOLDER}*", f".{_FOLDER}*"))
    choices = choices_after(record.get("choices", {}), overrides)
    measured = table(record.get("throughput"))
    evidence = filter(is_text, [at(measured, f"{part}.evidence") for part in ("bottleneck", "slow_rank")])
    notes = [f"in the run, {words}" for words in (*evidence, *course_words(measured))]
    processes = record.get("processes")
    if isinstance(processes, int) and processes > 1:
        notes.insert(0, f"the run used {processes} processes; one of them is explained, without communication")
    _explain(config, choices, out or run_dir / _FOLDER, notes)


def _explain(
    config: dict[str, Any], choices: dict[str, str], folder: Path, notes: Sequence[str] = (), names_data: bool = True
) -> None:
    """Measure a step, print it with the notes, and write files; `names_data`: whether the user has chosen the data."""
    exit_on_signals()
    with quick_imports():
        from ..callbacks._explanation import explanation_text
        from ..training.explain import explain

    explanation, files = explain(config, choices, folder, names_data)
    explanation = replace(explanation, notes=[*notes, *explanation.notes])
    print(explanation_text(explanation), flush=True)
    with as_write_error("--out", folder):
        folder = write_folder(folder, {**files, FILE: json.dumps(explanation.to_dict(), indent=1).encode()})
    print(f"\nexplain  {folder / FILE}")
    if TRACE in files:
        print(f"trace    {folder / TRACE} (for https://ui.perfetto.dev)")
