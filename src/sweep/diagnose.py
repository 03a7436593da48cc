"""`experiment=diagnose`: a baseline, each change that may help alone, the two best together, and the baseline again.

Every run is a run of a sweep: in a process of its own, in a folder of its own, and kept when the diagnosis is started
again. Hydra starts a diagnosis as a sweep of one job.
"""

import os
from typing import Any

from ..analysis.diagnose import AGAIN, BASELINE, CHANGE, TOGETHER, Findings, best_pair, find_findings
from ..analysis.run import Run
from ..errors import UserError
from ..records.rates import RATE
from ..records.terminal import wrapped
from .changes import Change, changes_to_try, fixed_options, folder_of, this_machine, words_of
from .plans import Job, Plan, RunFailed
from .search import Diagnosis

NAME = "diagnose"  # of the experiment


def diagnose(job: Job, search: Diagnosis) -> Plan[None]:
    """The runs of a diagnosis, in folders below the job's own.

    Raises:
        RunFailed: if the baseline did not finish.
        UserError: if the baseline has no rate.
    """
    done, at_most = 0, ""

    def changed(role: str, change: Change, **known: Any) -> Job:
        nonlocal done
        done += 1
        title = f"run {done}{at_most}: {' '.join(words_of(change)) or role.replace('_', ' ')}"
        facts = {"role": role, "options": words_of(change), **known}
        return job.below(folder_of(change) or role, change, title, diagnosis=facts)

    (record,) = yield [changed(BASELINE, {})]
    if record["status"] != "finished":
        raise RunFailed(f"{job.run_dir}: {record.get('error') or record['status']}")
    baseline = Run(BASELINE, job.run_dir, record)
    if RATE not in baseline.values:
        place = os.path.relpath(job.run_dir / BASELINE)
        raise UserError(
            f"experiment={NAME}: needs the rate of a run, and {place} has none; leave callbacks.throughput on"
        )
    machine = this_machine(str(record["hardware"]["device"]))
    fixed = fixed_options(job.facts["overrides"])
    changes, not_tried = changes_to_try(job.config, baseline, machine, fixed, search.batch_factors)
    print("\n".join(["", *wrapped(not_tried)]), flush=True)
    at_most = f" of at most {len(changes) + 3}"
    for change in changes:  # one that is refused is a result, and in the table
        yield [changed(CHANGE, change, not_tried=not_tried)]
    # Of a diagnosis that is started again, what came later is there already, and decides nothing here.
    alone = [trial for trial in find_findings(job.run_dir).trials if trial.role in (BASELINE, CHANGE)]
    best = [trial.options for trial in best_pair(Findings(alone))]
    pair = [change for change in changes if tuple(words_of(change)) in best]
    if len(pair) == 2:
        yield [changed(TOGETHER, pair[0] | pair[1])]
    yield [changed(AGAIN, {}, not_tried=not_tried)]
