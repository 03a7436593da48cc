"""`experiment=diagnose`: a baseline and each change that may help beside it, then the two best together, beside the baseline again.

What can wait is visited side by side; other runs follow each other, and the baseline follows them. Every run is a run of a
sweep: in a process of its own, in a folder of its own, and kept when the diagnosis is started again, with those that it
shared passes with. Hydra starts a diagnosis as a sweep of one job.
"""

from collections.abc import Sequence
from dataclasses import replace

from .._system import relative
from ..analysis.diagnose import Findings
from ..analysis.run import Run
from ..errors import UserError
from ..records.rates import RATE, why_no_rate
from ..records.values import at, positive
from .changes import Change, changes_to_try, fixed_options, folder_of, this_machine, words_of
from .folder import has_ended, set_run_aside
from .plans import Job, Plan, RunFailed
from .search import Diagnosis
from .visits import can_wait


def diagnose(job: Job, search: Diagnosis) -> Plan:
    """The runs of a diagnosis, in folders below the job's own. UserError for a baseline that fails or has no rate."""
    fixed = fixed_options(job.facts["overrides"])
    changes, not_tried = changes_to_try(job.config, this_machine(job.config), fixed, search.batch_factors)
    waits, number = can_wait(job.config), 0
    most = 1 + len(changes) + 2 + (0 if waits else 1)
    job = replace(job, seconds=positive(at(job.config, "callbacks.until_known.seconds")))

    def run(name: str, change: Change) -> Job:
        """The next run, in the folder `name`."""
        nonlocal number
        number += 1
        title = f"run {number} of at most {most}: {' '.join(words_of(change)) or name.replace('_', ' ')}"
        return job.below(name, change, title, diagnosis={"options": words_of(change), "not_tried": not_tried})

    jobs = [run("baseline", {}), *(run(folder_of(change), change) for change in changes)]
    if not waits:
        jobs.append(run("baseline_2", {}))  # it shows drift
    _alike(jobs)
    runs: list[Run] = []
    for part in [jobs] if waits else [jobs[:1], jobs[1:]]:
        records = yield part  # a change that is refused is a result, and in the table
        runs += [Run(one.run_dir.name, one.run_dir, record) for one, record in zip(part, records, strict=True)]
        _check_baseline(jobs[0], runs[0])
    best = [trial.options for trial in Findings(runs).best_pair]
    pair = [change for change in changes if tuple(words_of(change)) in best]
    if len(pair) == 2:
        both = pair[0] | pair[1]
        last = [run("baseline_3", {}), run(folder_of(both), both)]
        yield _alike(last if waits else last[::-1])


def _check_baseline(job: Job, run: Run) -> None:
    """Raise RunFailed for a baseline that did not finish, and UserError for one without a rate."""
    if run.status != "finished":
        raise RunFailed.of(job, run.record)
    if RATE not in run.values:
        place = relative(job.run_dir)
        raise UserError(
            f"experiment=diagnose: needs the rate of a run, and {place} has none: {why_no_rate(run.record)}"
        )


def _alike(jobs: Sequence[Job]) -> Sequence[Job]:
    """The jobs: all of them are kept, or none, because passes do not go on."""
    ended = [job for job in jobs if has_ended(job.run_dir)]
    if len(ended) < len(jobs):
        for job in ended:
            set_run_aside(job.run_dir)
    return jobs
