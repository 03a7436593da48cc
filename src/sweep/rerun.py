"""`compare --rerun`: pairs of runs, A B, B A, A B, …, until it is decided which is slower, or a limit is reached.

Runs of different hours differ by the hour. The two of a pair share it, and their ratio is what differs between A and B. Where
they can wait they are visited side by side, as the runs of a sweep are; elsewhere they follow each other, in changing order. Each
is a process of its own, because two processes of the same thing differ, too: the test is over pairs.
"""

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._system import relative
from ..analysis.compare import Comparison, measured
from ..analysis.read import find
from ..analysis.run import Run
from ..checkpointing.resume import recorded_config
from ..errors import UserError
from ..files import new_folder, writing
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_timing
from ..options.compose import apply_overrides, choices_after
from ..records.formatting import significant
from ..records.read import FILE
from ..records.values import at, positive
from .loop import Loop
from .plans import Job, Plan
from .visits import can_wait

# Pairs, after which it is asked whether it is decided. With normal noise of 2 to 10 % a pair and questions after 5 to 15 of
# them, a simulation has 0 to 4.3 % false alarms, and finds 10 % in 100 to 91 % of the comparisons.
FEWEST = 5


def rerun(
    folders: Sequence[Path],
    out: Path,
    most: int,
    seconds: float,
    pythons: Sequence[str],
    overrides: list[str],
    max_slowdown: float = 0.05,
) -> list[Path]:
    """Run what two folders hold again, in at most so many pairs; returns the folders of the new runs, one a side.

    Each side has a Python: another checkout has another environment. The overrides change both sides, and confirm what
    a record alone cannot decide (trust.py). UserError if a record cannot be run again, before anything is run, and if a
    run fails.
    """
    runs = [measured(side, find([folder]))[0][0] for side, folder in zip("AB", folders, strict=True)]
    a, b = (check_config(for_timing(_recorded(run), seconds)) for run in runs)
    trust.refuse_differing(a, b, overrides)
    jobs = [job_of(*side, overrides, seconds) for side in zip("ab", runs, pythons, strict=True)]
    with writing("--out", out):
        out = new_folder(out)
    sides = [out / "a", out / "b"]
    Loop("compare").run(a_b(jobs, out, most, lambda: decided(sides, max_slowdown)))
    return sides


def a_b(sides: Sequence[Job], out: Path, most: int, decided: Callable[[], bool] = lambda: False) -> Plan:
    """Run the sides so many times at most, as `out/<side>/<time>`. The folder of a side is its name.

    From the fifth time on it ends as soon as `decided` says so. UserError if a run does not finish.
    """
    identity = secrets.token_hex(4)
    forks = all(side.python == sys.executable for side in sides)  # all start alike
    shared = all(can_wait(side.config) for side in sides)  # their passes have numbers of their own
    placed = [replace(side, forks=forks, run_dir=out / side.run_dir.name) for side in sides]
    for number in range(most):
        title = f"pair {number + 1} of at most {most}"
        facts = {"of": identity} if shared else {"of": identity, "pair": number}
        order = placed if number % 2 == 0 else placed[::-1]
        jobs = [side.below(str(number), {}, f"{title}: {side.title}", rerun=facts) for side in order]
        records = yield jobs
        times = []
        for job, record in zip(jobs, records, strict=True):
            side, ms = job.run_dir.parent.name.upper(), positive(at(record, "throughput.step_ms_median"))
            if record["status"] != "finished" or ms is None:
                why = record.get("error") or "no step was measured"
                raise UserError(f"compare: a run of {side} did not finish: {why}")
            times.append(f"{side} {significant(ms)} ms")
        print(f"{title}: {', '.join(sorted(times))}", flush=True)
        if number + 1 >= FEWEST and decided():
            return


def decided(sides: Sequence[Path], max_slowdown: float) -> bool:
    """Whether B is shown to be slower than allowed, or not to be."""
    found = Comparison(*sides, max_slowdown=max_slowdown)
    return bool(found.slowdown.span) and (found.exit_code == 3 or found.slowdown.high <= 1 + max_slowdown)


def job_of(side: str, run: Run, python: str, overrides: list[str], seconds: float) -> Job:
    """A short timed run of what a run's record has, as a side. Raises UserError for a record that cannot be run again."""
    config = check_config(for_timing(check_config(apply_overrides(_recorded(run), overrides)), seconds))
    trust.confirm(config, overrides, relative(run.folder / FILE))
    choices = choices_after(run.record.get("choices", {}), overrides)
    facts = {"choices": choices, "overrides": [*run.record.get("overrides", []), *overrides]}
    return Job(Path(side), config, facts, side.upper(), python=python, seconds=seconds)


def _recorded(run: Run) -> dict[str, Any]:
    """The checked configuration of a run's record."""
    try:
        return check_config(recorded_config(run.record, run.folder))
    except UserError as error:
        raise UserError(f"{relative(run.folder / FILE)}: cannot be run again: {error}") from error
