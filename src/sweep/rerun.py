"""Two runs again, in turns: A B, B A, A B, …, so that a slow minute of the machine slows both.

Runs of different hours differ by the hour. Within a round both have the same hour, and the ratio of the two is what
differs between A and B. The order within a round changes, so that being second costs both sides alike.

On a CPU, A and B take turns as the runs of a sweep do: both wait in processes of their own, which are replaced after a few
rounds, because two processes of the same thing differ, too. Elsewhere each turn is a process.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

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
from .fork_server import JOB, ForkServer, is_supported, modules_of
from .process import Ending, end_group, wait_for_group
from .runner import _is_one_process
from .turn_processes import CannotFork, TurnRun, is_suited

ROUNDS_TOGETHER = 3  # that the same processes take part in
MIN_STEPS = 15  # of a turn, however long they are
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
    with forking([side for both in sides for side in both]) as server:
        for number, (pair, both) in enumerate(zip(pairs, sides, strict=True)):

            def say(turn: int, medians: Mapping[str, float], label: str = pair.label) -> None:
                times = ", ".join(f"{name.upper()} {1e3 * medians[name]:.3g} ms" for name in sorted(medians))
                if not quiet:
                    print(f"{label + ': ' if label else ''}round {turn + 1} of {rounds}: {times}", flush=True)

            take_rounds(both, out, str(number), rounds, seconds, server, say)
    return [out / "a", out / "b"]


def _sides(pair: Pair, pythons: Sequence[str], overrides: list[str], seconds: float) -> list[Side]:
    found = []
    for name, python, runs in zip("ab", pythons, (pair.a, pair.b), strict=True):
        run = runs[0]
        file = os.path.relpath(run.folder / FILE)
        record = read(run.folder)
        config = check_config(apply_overrides(check_config(recorded_config(record, run.folder)), overrides))
        config = check_config(for_timing(config, seconds))
        trust.confirm(config, overrides, file, run_dir=run.folder)
        known = {key: value for key, value in record.get("choices", {}).items() if value is not None}
        memory = run.values.get("memory_peak_gib", 0.0)
        found.append(Side(name, config, known, record.get("overrides", []), python, memory))
    return found


@contextlib.contextmanager
def forking(sides: Sequence[Side]) -> Iterator[ForkServer | None]:
    """A server that forks the runs; None where it cannot, or where another Python runs a side: both start alike."""
    server = None
    if is_supported() and all(s.python == sys.executable and _is_one_process(s.config) for s in sides):
        server = ForkServer(modules_of(side.config for side in sides))
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def take_rounds(
    sides: Sequence[Side], out: Path, name: str, rounds: int, seconds: float, server: ForkServer | None, say: Say
) -> None:
    """Give each side a turn in every round; the runs are written to `out/<side>/<name>-<number of the first round>`.

    Raises:
        UserError: if a run does not finish.
    """
    identity, first = secrets.token_hex(4), 0
    if server is not None and _can_wait(sides):
        with contextlib.suppress(CannotFork):
            while first < rounds:
                last = min(first + ROUNDS_TOGETHER, rounds)
                _take_turns(sides, out, f"{name}-{first}", range(first, last), seconds, server, identity, say)
                first = last
    for turn in range(first, rounds):
        medians = {}
        for side in _order(sides, turn):
            place = out / side.name / f"{name}-{turn}"
            medians[side.name] = run_alone(side, place, seconds, server, {"of": identity, "round": turn})
        say(turn, medians)


def _can_wait(sides: Sequence[Side]) -> bool:
    """Whether the runs can wait for each other, with their memory."""
    memory = sum(side.memory_gib for side in sides) * 2**30
    enough = memory <= _SHARE_OF_MEMORY * psutil.virtual_memory().available
    return enough and all(is_suited(_until_stopped(side.config)) for side in sides)


def _order(sides: Sequence[Side], turn: int) -> Sequence[Side]:
    return sides if turn % 2 == 0 else sides[::-1]


def _until_stopped(config: dict[str, Any]) -> dict[str, Any]:
    trainer = {**config["trainer"], "max_time": None, "min_steps": None}
    return check_config({**config, "trainer": trainer, "callbacks": {**config["callbacks"], "until_known": _STOPS}})


def _take_turns(
    sides: Sequence[Side],
    out: Path,
    name: str,
    turns: range,
    seconds: float,
    server: ForkServer,
    identity: str,
    say: Say,
) -> None:
    """Some rounds of processes that wait for each other. Raises CannotFork before the first one."""
    runs: dict[str, TurnRun] = {}
    try:
        for side in sides:
            run_dir = out / side.name / name
            words = _plan(side, _until_stopped(side.config), run_dir, {"of": identity})
            runs[side.name] = TurnRun(run_dir, words, server, _keep_output)
            if runs[side.name].answer() is None:  # it has ended before its first turn
                runs[side.name].close()
                _median(side, run_dir)
        for turn in turns:
            say(turn, {side.name: _turn(runs[side.name], turn, seconds, side) for side in _order(sides, turn)})
        for side in sides:
            runs[side.name].stop("its turns were over")
            _median(side, runs[side.name].folder)
    finally:
        for run in runs.values():
            if not run.ended:
                end_group(run.process.pid)
                run.close(signal.SIGTERM)


def _turn(run: TurnRun, turn: int, seconds: float, side: Side) -> float:
    """One turn; a disturbed or a short one is repeated once. Returns the median step in seconds."""
    facts: Mapping[str, Any] | None = {}
    for _ in range(2):
        facts = run.turn(turn, max(seconds, MIN_STEPS * facts.get("median_s", 0.0)))
        if facts is None:
            run.close()
            raise _unfinished(side, run.folder)
        if not facts.get("disturbed") and facts.get("steps", 0) >= MIN_STEPS:
            break
    return facts.get("median_s", 0.0)


def _keep_output(run: TurnRun) -> None:
    with (run.folder / _LOG).open("wb") as log:
        for file in run.output:
            with file:
                file.seek(0)
                shutil.copyfileobj(file, log)


def _plan(side: Side, config: dict[str, Any], run_dir: Path, turn: Mapping[str, Any] | None) -> list[str]:
    """Write the record of a run that is to come; returns the words of its program."""
    here = os.path.relpath(run_dir)
    config = {**with_run_dir(config, str(config["run_dir"]), here), "run_dir": here}
    facts = {"turn": turn} if turn else {}
    plan(run_dir, config=config, choices=side.choices, overrides=side.overrides, **facts)
    return [trust.digest(config), here]


def run_alone(
    side: Side, run_dir: Path, seconds: float, server: ForkServer | None, turn: Mapping[str, Any] | None = None
) -> float:
    """A short timed run in a process of its own, which may be a turn; returns the median step in seconds.

    Raises:
        UserError: if it does not finish.
    """
    words = _plan(side, check_config(for_timing(side.config, seconds)), run_dir, turn)
    ending, code = Ending(run_dir), -signal.SIGKILL
    try:
        with (run_dir / _LOG).open("wb") as log:
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
    return _median(side, run_dir)


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
