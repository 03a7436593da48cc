"""`compare --rerun`: pairs of runs, A B, B A, A B, …, until it is decided which side is slower, or a limit is reached.

The speed of a machine drifts over hours, but little between the two runs of a pair. Their ratio shows the difference of
A and B. Runs that can wait are visited side by side, as in a sweep; others follow each other, in changing order. Each
run is a process of its own, because two processes of the same program differ, too: the test is over pairs.
"""

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._system import relative
from ..analysis.compare import Comparison, measured_runs
from ..analysis.read import read_sweep
from ..analysis.run import Run
from ..checkpointing.resume import recorded_config
from ..errors import UserError
from ..files import as_write_error, new_folder
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_timing
from ..options.compose import apply_overrides, choices_after
from ..records.formatting import significant
from ..records.read import FILE
from ..records.values import at, positive
from .loop import Loop
from .plans import Job, Plan

# Pairs before the first test. With normal noise of 2 to 10 % a pair and tests after 5 to 15 pairs, a simulation has 0
# to 4.3 % false alarms, and finds a slowdown of 10 % in 100 to 91 % of the comparisons.
MIN_PAIRS = 5


def rerun(
    folders: Sequence[Path],
    out: Path,
    max_pairs: int,
    seconds: float,
    pythons: Sequence[str],
    overrides: list[str],
    max_slowdown: float = 0.05,
) -> list[Path]:
    """Run what two folders hold again, in at most `max_pairs` pairs; return a folder of new runs for each side.

    Each side has a Python: another checkout has another environment. The overrides change both sides, and confirm what
    a record alone cannot decide (trust.py). UserError if a run fails, or, before any run, if a record cannot be rerun.
    """
    runs = [measured_runs(side, read_sweep([folder]))[0][0] for side, folder in zip("AB", folders, strict=True)]
    a, b = (check_config(for_timing(_recorded_config(run), seconds)) for run in runs)
    trust.refuse_differing(a, b, overrides)
    jobs = [side_job(*side, overrides, seconds) for side in zip("ab", runs, pythons, strict=True)]
    with as_write_error("--out", out):
        out = new_folder(out)
    side_dirs = [out / "a", out / "b"]
    Loop("compare").run(pair_plan(jobs, out, max_pairs, lambda: is_slowdown_decided(side_dirs, max_slowdown)))
    return side_dirs


def pair_plan(sides: Sequence[Job], out: Path, max_pairs: int, is_decided: Callable[[], bool] = lambda: False) -> Plan:
    """Yield pairs of runs, in the folders `out/<side>/<pair>`; the name of a side is that of its folder.

    From the fifth pair on the plan ends as soon as `is_decided` returns True. UserError if a run does not finish.
    """
    rerun_id = secrets.token_hex(4)
    may_fork = all(side.python == sys.executable for side in sides)  # both sides start in the same way
    side_jobs = [replace(side, may_fork=may_fork, run_dir=out / side.run_dir.name) for side in sides]
    for number in range(max_pairs):
        title = f"pair {number + 1} of at most {max_pairs}"
        rerun_fields = {"of": rerun_id, "pair": number}
        order = side_jobs if number % 2 == 0 else side_jobs[::-1]
        jobs = [side.below(str(number), {}, f"{title}: {side.title}", rerun=rerun_fields) for side in order]
        records = yield jobs
        times = []
        for job, record in zip(jobs, records, strict=True):
            name, ms = job.run_dir.parent.name.upper(), positive(at(record, "throughput.step_ms_median"))
            if record["status"] != "finished" or ms is None:
                why = record.get("error") or "no step was measured"
                raise UserError(f"compare: a run of {name} did not finish: {why}")
            times.append(f"{name} {significant(ms)} ms")
        print(f"{title}: {', '.join(sorted(times))}", flush=True)
        if number + 1 >= MIN_PAIRS and is_decided():
            return


def is_slowdown_decided(sides: Sequence[Path], max_slowdown: float) -> bool:
    """Whether the runs show that B is slower than allowed, or that B is not."""
    result = Comparison(*sides, max_slowdown=max_slowdown)
    return bool(result.slowdown.span) and (result.exit_code == 3 or result.slowdown.high <= 1 + max_slowdown)


def side_job(side: str, run: Run, python: str, overrides: list[str], seconds: float) -> Job:
    """Return a short timed run of a recorded configuration, as a side. UserError if the record cannot be run again."""
    config = check_config(for_timing(check_config(apply_overrides(_recorded_config(run), overrides)), seconds))
    trust.refuse_unconfirmed(config, overrides, relative(run.folder / FILE))
    choices = choices_after(run.record.get("choices", {}), overrides)
    record_fields = {"choices": choices, "overrides": [*run.record.get("overrides", []), *overrides]}
    return Job(Path(side), config, record_fields, side.upper(), python=python, seconds=seconds)


def _recorded_config(run: Run) -> dict[str, Any]:
    """Return the checked configuration of a run's record."""
    try:
        return check_config(recorded_config(run.record, run.folder))
    except UserError as error:
        raise UserError(f"{relative(run.folder / FILE)}: cannot be run again: {error}") from error
