"""Multi-device scaling as measured: runs on several devices compared with runs on one that differ in nothing else."""

import statistics

from ..records.formatting import count, percent, significant
from ..records.rates import RATE
from .run import SEED, Run

# Settings that follow from the number of devices, or do not matter beside it.
_ALONG = ("trainer.devices", "trainer.num_nodes", SEED, "trainer.strategy", "trainer", "threads")


def efficiencies(runs: list[Run]) -> dict[str, float]:
    """By the name of each run on several devices: its samples/s as a fraction of those of as many single devices.

    The rate of a single device is that of a run with the same settings otherwise, the batch size of each device included;
    the median, if seeds repeat that run. A run on several devices without such a run is left out.
    """
    single: dict[str, list[float]] = {}
    for run in runs:
        if RATE in run.values and run.processes == 1:
            single.setdefault(_alike(run), []).append(run.values[RATE])
    return {
        run.name: run.values[RATE] / (run.processes * statistics.median(single[_alike(run)]))
        for run in runs
        if run.processes > 1 and RATE in run.values and _alike(run) in single
    }


def _alike(run: Run) -> str:
    return repr(sorted((key, repr(value)) for key, value in run.settings.items() if key not in _ALONG))


def headlines(runs: list[Run]) -> list[str]:
    """A line for each run on several devices that can be compared."""
    reached = efficiencies(runs)
    lines = []
    for run in (run for run in runs if run.name in reached):
        efficiency, devices = reached[run.name], run.processes
        line = (
            f"{run.model}: {devices} devices with {run.batch_size:,} samples each reach "
            f"{significant(devices * efficiency)}× the samples/s of one, a scaling efficiency of {percent(efficiency)}"
        )
        if "communication_share" in run.values:
            line += f"; they wait for gradients in {percent(run.values['communication_share'])} of a step"
        lines.append(f"{line}.")
    return lines


def doubts(runs: list[Run]) -> list[str]:
    """What makes a comparison of devices unfair: on a CPU the processes share the cores."""
    reached = efficiencies(runs)
    notes = []
    for run in (run for run in runs if run.name in reached):
        threads = run.settings.get("threads")
        alone = {r.settings.get("threads") for r in runs if _alike(r) == _alike(run) and r.processes == 1}
        if threads is not None and alone != {threads}:
            before = " or ".join(map(str, sorted(filter(None, alone))))
            notes.append(f"{run.name}: each process had {count(threads, 'thread')}; the run on one device had {before}")
    return notes
