"""Two runs again, in turns: short timed runs A B, B A, A B, …, each in a process of its own.

Runs of different hours differ by the hour. Within a round both have the same hour, and the ratio of the two is what
differs between A and B. The order within a round changes, so that being second costs both sides alike.
"""

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.match import Pair, match
from ..analysis.read import find
from ..checkpointing.resume import recorded_config, with_run_dir
from ..errors import UserError
from ..files import new_folder, why
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_timing
from ..options.compose import apply_overrides
from ..records.read import FILE, read
from ..records.run_record import plan

_END_S = 20  # for a run that was asked to stop
_LOG = "log.txt"  # what the runs print


@dataclass(frozen=True)
class _Side:
    """One side of a pair, ready to be run again."""

    name: str  # `a` or `b`
    python: str
    config: dict[str, Any]  # checked
    choices: dict[str, str]
    overrides: list[str]


def rerun(
    folders: Sequence[Path],
    out: Path,
    rounds: int,
    seconds: float,
    pythons: Sequence[str],
    overrides: list[str],
    quiet: bool = False,
) -> list[Path]:
    """Run what two folders hold again, in turns; returns the folders of the new runs, one a side.

    Args:
        folders: of A and of B. Of repeated runs, the first is run again.
        out: is written to, as `a` and `b`.
        rounds: turns of each side.
        seconds: of training in a turn, at least; 15 steps are always trained.
        pythons: that run A and B. Another checkout has another environment.
        overrides: options that change both sides, and confirm what a record alone cannot decide (see trust.py).
        quiet: prints no progress.

    Raises:
        UserError: before anything is run, if a record cannot be run again; or if a run fails.
    """
    pairs, _ = match(*(find([folder]) for folder in folders))
    sides = [_sides(pair, pythons, overrides, seconds) for pair in pairs]
    try:
        out = new_folder(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {why(error)}") from error
    for number, (pair, both) in enumerate(zip(pairs, sides, strict=True)):
        identity = secrets.token_hex(4)
        for turn in range(rounds):
            found = {}
            for side in both if turn % 2 == 0 else both[::-1]:
                found[side.name] = _run(side, out / side.name / f"{number}-{turn}", {"of": identity, "round": turn})
            if not quiet:
                times = ", ".join(f"{name.upper()} {found[name]:.3g} ms" for name in sorted(found))
                print(f"{pair.label + ': ' if pair.label else ''}round {turn + 1} of {rounds}: {times}", flush=True)
    return [out / "a", out / "b"]


def _sides(pair: Pair, pythons: Sequence[str], overrides: list[str], seconds: float) -> list[_Side]:
    found = []
    for name, python, runs in zip("ab", pythons, (pair.a, pair.b), strict=True):
        run = runs[0]
        file = os.path.relpath(run.folder / FILE)
        record = read(run.folder)
        config = check_config(apply_overrides(check_config(recorded_config(record, run.folder)), overrides))
        config = check_config(for_timing(config, seconds))
        trust.confirm(config, overrides, file, run_dir=run.folder)
        known = {key: value for key, value in record.get("choices", {}).items() if value is not None}
        found.append(_Side(name, python, config, known, record.get("overrides", [])))
    return found


def _run(side: _Side, run_dir: Path, turn: dict[str, Any]) -> float:
    """One turn; returns the median step in ms."""
    here = os.path.relpath(run_dir)
    config = {**with_run_dir(side.config, str(side.config["run_dir"]), here), "run_dir": here}
    plan(run_dir, config=config, choices=side.choices, overrides=side.overrides, turn=turn)
    command = [side.python, "-m", "batchscope.sweep.job", trust.digest(config), here]
    try:
        with (run_dir / _LOG).open("wb") as log, _process(command, log) as process:
            process.wait()
    except OSError as error:
        raise UserError(f"compare: {side.python} cannot be started: {why(error)}") from error
    record = read(run_dir)
    median = record.get("throughput", {}).get("step_ms_median")
    if record.get("status") != "finished" or not isinstance(median, int | float):
        said = record.get("error") or f"its output is in {run_dir / _LOG}"
        raise UserError(f"compare: a run of {side.name.upper()} did not finish: {said}")
    return median


@contextlib.contextmanager
def _process(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this one: it stops when its standard input closes (see job.py)."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    except BaseException:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)  # closes its standard input
        raise
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
