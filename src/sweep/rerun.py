"""Two runs again, in turns: A B, B A, A B, …, so that a slow minute of the machine slows both.

Runs of different hours differ by the hour. Within a round both have the same hour, and the ratio of the two is what
differs between A and B. The order changes, so that being second costs both sides alike.

Each side of a round is a process of its own, because two processes of the same thing differ, too. On a CPU the processes of
a round wait for each other and alternate every moment, as the runs of a sweep do. Elsewhere they follow each other.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.match import Pair, match
from ..analysis.read import find
from ..checkpointing.resume import recorded_config, with_run_dir
from ..errors import UserError, warn
from ..files import WriteError, new_folder, why
from ..hardware.host_memory import host_memory
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_timing
from ..options.compose import apply_overrides
from ..records.intervals import TIME_LIMIT
from ..records.read import FILE, read
from ..records.run_record import plan
from . import fork_server
from .fork_server import JOB, ForkServer
from .passes import VISIT_S
from .process import Ending, end_group, wait_for_group
from .runner import is_one_process
from .turn_processes import CannotFork, TurnRun, is_suited

MIN_STEPS = 15  # of a run, however long they are
_LOG = "log.txt"  # what the runs print
_SHARE_OF_MEMORY = 0.75  # of what is available, for runs that wait for each other
_STOPS = {"_target_": "batchscope.callbacks.until_known.StopWhenKnown"}  # it leaves the end to who gives the turns
Say = Callable[[int, Mapping[str, float]], None]  # after each round: its number, and the median step of each side in s


@dataclass(frozen=True)
class Side:
    """One side, ready to be run again."""

    name: str  # `a` or `b`
    config: dict[str, Any]  # checked; what it says on its length does not matter
    choices: dict[str, str]
    overrides: list[str]
    python: str = sys.executable
    memory_gib: float = 0.0  # that it needs; 0 if unknown


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
        rounds: of which each has a run of both sides.
        seconds: of training of each side in a round, at least; 15 steps are always trained.
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
    with forking([side for both in sides for side in both]) as server:
        for number, (pair, both) in enumerate(zip(pairs, sides, strict=True)):

            def say(turn: int, medians: Mapping[str, float], label: str = pair.label) -> None:
                times = ", ".join(f"{name.upper()} {1e3 * medians[name]:.3g} ms" for name in sorted(medians))
                if not quiet:
                    print(f"{label + ': ' if label else ''}pass {turn + 1} of {rounds}: {times}", flush=True)

            take_rounds(both, out, str(number), rounds, seconds, server, say)
    return [out / "a", out / "b"]


def _sides(pair: Pair, pythons: Sequence[str], overrides: list[str], seconds: float) -> list[Side]:
    found = []
    for name, python, runs in zip("ab", pythons, (pair.a, pair.b), strict=True):
        run = runs[0]
        file = os.path.relpath(run.folder / FILE)
        record = read(run.folder)
        try:
            recorded = check_config(recorded_config(record, run.folder))
        except UserError as error:
            raise UserError(f"{file}: cannot be run again: {error}") from error
        config = check_config(for_timing(check_config(apply_overrides(recorded, overrides)), seconds))
        trust.confirm(config, overrides, file, run_dir=run.folder)
        known = {key: value for key, value in record.get("choices", {}).items() if value is not None}
        memory = run.values.get("memory_peak_gib", 0.0)
        found.append(Side(name, config, known, record.get("overrides", []), python, memory))
    return found


def forking(sides: Sequence[Side]) -> AbstractContextManager[ForkServer | None]:
    """A server that forks the runs; None where it cannot, or where another Python runs a side: both start alike."""
    alike = all(side.python == sys.executable and is_one_process(side.config) for side in sides)
    return fork_server.forking([side.config for side in sides], wanted=alike)


def take_rounds(
    sides: Sequence[Side], out: Path, name: str, rounds: int, seconds: float, server: ForkServer | None, say: Say
) -> None:
    """Give each side a turn in every round: a run in `out/<side>/<name>-<round>`.

    Raises:
        UserError: if a run does not finish.
    """
    identity, turns, can_wait = secrets.token_hex(4), 0, server is not None and _can_wait(sides)
    for number in range(rounds):
        order = sides if number % 2 == 0 else sides[::-1]
        places = {side.name: out / side.name / f"{name}-{number}" for side in sides}
        if server is not None and can_wait:
            try:
                turns = _alternate(order, places, seconds, server, {"of": identity}, turns)
            except CannotFork:
                can_wait = False
        if not can_wait:
            for side in order:
                run_alone(side, places[side.name], seconds, server, {"of": identity, "round": turns})
            turns += 1
        say(number, {side.name: _median(side, places[side.name]) for side in sides})


def _can_wait(sides: Sequence[Side]) -> bool:
    """Whether the runs can wait for each other, with their memory."""
    memory = sum(side.memory_gib for side in sides) * 2**30
    enough = memory <= _SHARE_OF_MEMORY * host_memory().available
    return enough and all(is_suited(_until_stopped(side.config)) for side in sides)


def _until_stopped(config: dict[str, Any]) -> dict[str, Any]:
    """A timed run that goes on until it is told to stop."""
    timed = for_timing(config, 1.0)
    timed["trainer"] |= {"max_time": None, "min_steps": None}
    timed["callbacks"] |= {"until_known": _STOPS}
    return check_config(timed)


def _alternate(
    sides: Sequence[Side],
    places: Mapping[str, Path],
    seconds: float,
    server: ForkServer,
    facts: dict[str, Any],
    turn: int,
) -> int:
    """A round of processes that wait for each other, and alternate, from this turn on; returns the number of the next.

    Raises:
        CannotFork: where a run cannot be forked.
    """
    runs: list[TurnRun] = []
    try:
        for side in sides:
            words = _plan(side, _until_stopped(side.config), places[side.name], facts)
            runs.append(TurnRun(places[side.name], words, server, _keep_output))
        for side, run in zip(sides, runs, strict=True):  # which are set up side by side
            if run.answer() is None:
                raise _ended(side, run)
        for side, run in zip(sides, runs, strict=True):
            run.warm_up()
            if run.ended:
                raise _ended(side, run)
        first, steps = turn, [0] * len(runs)
        while (turn - first) * VISIT_S < seconds or min(steps) < MIN_STEPS:
            for n in range(len(runs))[:: 1 if turn % 2 == 0 else -1]:
                found = runs[n].turn(turn, VISIT_S)
                if found is None:
                    raise _ended(sides[n], runs[n])
                steps[n] += found.get("steps") or 1
            turn += 1
        for run in runs:
            run.stop(TIME_LIMIT)
        return turn
    finally:
        left = [run for run in runs if not run.ended]
        for run in left:
            end_group(run.process.pid)
        for run in left:
            run.close(signal.SIGTERM)


def _ended(side: Side, run: TurnRun) -> UserError:
    run.close()
    return _unfinished(side, run.folder)


def _keep_output(run: TurnRun) -> None:
    try:
        with (run.folder / _LOG).open("wb") as log:
            for file in run.output:
                with file:
                    file.seek(0)
                    shutil.copyfileobj(file, log)
    except OSError as error:
        warn(f"{run.folder / _LOG} cannot be written: {why(error)}")


def _plan(side: Side, config: dict[str, Any], run_dir: Path, turn: Mapping[str, Any] | None) -> list[str]:
    """Write the record of a run that is to come; returns the words of its program."""
    here = os.path.relpath(run_dir)
    config = {**with_run_dir(config, str(config["run_dir"]), here), "run_dir": here}
    facts = {"turn": turn} if turn else {}
    plan(run_dir, config=config, choices=side.choices, overrides=side.overrides, **facts)
    return [trust.digest(config), here]


def run_alone(
    side: Side, run_dir: Path, seconds: float, server: ForkServer | None, turn: Mapping[str, Any] | None = None
) -> None:
    """A short timed run in a process of its own, which may be a turn.

    Raises:
        UserError: if it does not finish.
    """
    words = _plan(side, check_config(for_timing(side.config, seconds)), run_dir, turn)
    ending, code = Ending(run_dir), -signal.SIGKILL
    try:
        opened = (run_dir / _LOG).open("wb")
    except OSError as error:
        raise WriteError(f"{run_dir / _LOG} cannot be written: {why(error)}") from error
    try:
        with opened as log:
            process = server.fork(words, (log.fileno(), log.fileno())) if server else None
            process = process or _new_python(side.python, words, log)
            try:
                code = process.wait()
            finally:
                end_group(process.pid)
                wait_for_group(process.pid)
                ending.record(code, None)
    except OSError as error:
        raise UserError(f"compare: {side.python} cannot be started: {why(error)}") from error
    _median(side, run_dir)


def _new_python(python: str, words: list[str], log: Any) -> subprocess.Popen[bytes]:
    """A process that ends with this one: it stops when its standard input closes (see job.py)."""
    command = [python, "-m", JOB, *words]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _median(side: Side, run_dir: Path) -> float:
    """The median step of a run that has finished, in seconds."""
    record = read(run_dir)
    median = record.get("throughput", {}).get("step_ms_median")
    if record.get("status") != "finished" or not isinstance(median, int | float):
        raise _unfinished(side, run_dir)
    return median / 1e3


def _unfinished(side: Side, run_dir: Path) -> UserError:
    said = read(run_dir).get("error") or "it did not say why"
    return UserError(f"compare: a run of {side.name.upper()} did not finish: {said}; its output: {run_dir / _LOG}")
