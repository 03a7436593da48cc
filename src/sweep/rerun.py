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
from ..options.compose import apply_overrides
from ..records.read import FILE, read
from ..records.values import at, positive
from .loop import Loop
from .plans import Job, Plan, Record
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
    runs = {side: measured(side.upper(), find([folder]))[0] for side, folder in zip("ab", folders, strict=True)}
    jobs = [job_of(side, of[0], python, overrides) for (side, of), python in zip(runs.items(), pythons, strict=True)]
    with writing("--out", out):
        out = new_folder(out)
    sides = [out / "a", out / "b"]
    Loop("compare").run(a_b(jobs, out, most, seconds, lambda: decided(sides, max_slowdown)))
    return sides


def a_b(
    sides: Sequence[Job],
    out: Path,
    most: int,
    seconds: float,
    decided: Callable[[], bool] = lambda: False,
) -> Plan:
    """Run the sides so many times at most, as `out/<side>/<time>`. The folder of a side is its name.

    From the fifth time on it ends as soon as `decided` says so. UserError if a run does not finish.
    """
    identity = secrets.token_hex(4)
    for number in range(most):
        order = sides if number % 2 == 0 else sides[::-1]
        forks = all(side.python == sys.executable for side in sides)  # all start alike
        title = f"pair {number + 1} of at most {most}"
        jobs = [_placed(side, out / side.run_dir.name / str(number), title, seconds, forks) for side in order]
        shared = all(can_wait(job.config) for job in jobs)  # their passes have numbers of their own
        for job in jobs:
            job.facts["rerun"] = {"of": identity} if shared else {"of": identity, "pair": number}
        records = yield jobs
        medians = {}
        for job, record in zip(jobs, records, strict=True):
            side = job.run_dir.parent.name.upper()
            medians[side] = _median_step(record, side)
        times = ", ".join(f"{side} {1e3 * medians[side]:.3g} ms" for side in sorted(medians))
        print(f"{title}: {times}", flush=True)
        if number + 1 >= FEWEST and decided():
            return


def decided(sides: Sequence[Path], max_slowdown: float) -> bool:
    """Whether B is shown to be slower than allowed, or not to be."""
    found = Comparison(*sides, max_slowdown=max_slowdown)
    is_slower = found.slowdown.low > 1 and found.slowdown.value > 1 + max_slowdown
    return bool(found.slowdown.span) and (is_slower or found.slowdown.high <= 1 + max_slowdown)


def job_of(side: str, run: Run, python: str, overrides: list[str]) -> Job:
    """A run, ready to be run again as a side. Raises UserError for a record that cannot be."""
    file = relative(run.folder / FILE)
    record = read(run.folder)
    try:
        recorded = check_config(recorded_config(record, run.folder))
    except UserError as error:
        raise UserError(f"{file}: cannot be run again: {error}") from error
    config = check_config(apply_overrides(recorded, overrides))
    trust.confirm(check_config(for_timing(config, 1.0)), overrides, file)
    known = {key: value for key, value in record.get("choices", {}).items() if value is not None}
    facts = {"choices": known, "overrides": record.get("overrides", [])}
    return Job(Path(side), config, facts, side.upper(), python=python)


def _placed(side: Job, run_dir: Path, title: str, seconds: float, forks: bool) -> Job:
    """A short timed run of a side, in its folder."""
    config = check_config(for_timing(side.config, seconds))
    title, facts = f"{title}: {side.title}", dict(side.facts)
    return replace(side, run_dir=run_dir, config=config, facts=facts, title=title, forks=forks, seconds=seconds)


def _median_step(record: Record, side: str) -> float:
    """The median step of a run in seconds. Raises UserError unless it has one."""
    median = positive(at(record, "throughput.step_ms_median"))
    if record["status"] != "finished" or median is None:
        raise UserError(f"compare: a run of {side} did not finish: {record.get('error') or 'no step was measured'}")
    return median / 1e3
