"""`experiment=diagnose`: a baseline, then each change that may help beside the baseline, then the two best together beside it.

What can wait is visited side by side with the baseline; other runs follow each other, and the baseline follows them. Every
run is a run of a sweep: in a process of its own, in a folder of its own, and kept when the diagnosis is started again.
Hydra starts a diagnosis as a sweep of one job.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

from ..analysis.diagnose import AGAIN, BASELINE, CHANGE, Findings
from ..analysis.run import Run
from ..errors import UserError
from ..records.rates import RATE, why_no_rate
from ..records.values import at, positive
from .changes import Change, changes_to_try, fixed_options, folder_of, this_machine, words_of
from .folder import has_ended
from .plans import Job, Plan, RunFailed
from .search import Diagnosis
from .visits import MOST_AT_ONCE, can_wait

_AGAIN = "-again"  # in the name of a folder


def diagnose(job: Job, search: Diagnosis) -> Plan[None]:
    """The runs of a diagnosis, in folders below the job's own. UserError for a baseline that fails or has no rate."""
    tried = _Tried(job)
    (record,) = yield [tried.run(BASELINE, BASELINE, {})]
    if record["status"] != "finished":
        raise RunFailed.of(job, record)
    baseline = Run(BASELINE, job.run_dir / BASELINE, record)
    if RATE not in baseline.values:
        place = os.path.relpath(baseline.folder)
        raise UserError(f"experiment=diagnose: needs the rate of a run, and {place} has none: {why_no_rate(record)}")
    machine = this_machine(str(record["hardware"]["device"]))
    fixed = fixed_options(job.facts["overrides"])
    changes, tried.not_tried = changes_to_try(job.config, baseline, machine, fixed, search.batch_factors)
    most = MOST_AT_ONCE - 1  # beside a baseline
    groups = [changes[first : first + most] for first in range(0, len(changes), most)]
    baselines = sum(tried.kept(f"{BASELINE}_{number}") + 1 for number in range(2, len(groups) + 3))
    tried.at_most = f" of at most {1 + len(changes) + 1 + baselines}"
    runs = [baseline]  # those that decide; of a diagnosis that is started again, what came later is there already
    for number, group in enumerate(groups, 2):  # a change that is refused is a result, and in the table
        jobs = tried.beside_baseline(f"{BASELINE}_{number}", group)
        runs += [Run(job.run_dir.name, job.run_dir, record) for job, record in zip(jobs, (yield jobs), strict=True)]
    best = [trial.options for trial in Findings(runs).best_pair]
    pair = [change for change in changes if tuple(words_of(change)) in best]
    if len(pair) == 2:
        yield tried.beside_baseline(f"{BASELINE}_{len(groups) + 2}", [pair[0] | pair[1]])


class _Tried:
    """The jobs of a diagnosis."""

    def __init__(self, job: Job):
        self._job = replace(job, seconds=positive(at(job.config, "callbacks.until_known.seconds")))
        self._number = 0
        self.at_most = ""
        self.not_tried: list[str] = []

    def run(self, role: str, name: str, change: Change) -> Job:
        """The next run, in the folder `name`."""
        self._number += 1
        title = f"run {self._number}{self.at_most}: {' '.join(words_of(change)) or role.replace('_', ' ')}"
        facts = {"role": role, "options": words_of(change), "not_tried": self.not_tried}
        return self._job.below(name, change, title, diagnosis=facts)

    def beside_baseline(self, name: str, changes: Sequence[Change]) -> list[Job]:
        """A run of each change, and of the baseline that they are compared with.

        Where some changes are kept and others are not, those that are not get a new baseline, because passes do not go on.
        """
        is_open = any(not has_ended(self._job.run_dir / folder_of(change)) for change in changes)
        kept = self.kept(name)
        fresh = 1 if is_open or not kept else 0
        baselines = [(AGAIN, f"{name}{_AGAIN * number}", Change()) for number in range(kept + fresh)]
        changed = [(CHANGE, folder_of(change), change) for change in changes]
        # Of passes the baseline is the first to get memory; where runs follow each other it is the last, and shows drift.
        waits = can_wait(self._job.config)
        return [self.run(*run) for run in ([*baselines, *changed] if waits else [*changed, *baselines])]

    def kept(self, name: str) -> int:
        """How many runs of a baseline are kept."""
        kept = 0
        while has_ended(self._job.run_dir / f"{name}{_AGAIN * kept}"):
            kept += 1
        return kept
