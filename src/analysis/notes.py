"""What the runs of a sweep do not allow to conclude, one line each."""

from collections.abc import Callable, Sequence

from ..records.formatting import percent
from ..records.rates import RATE
from ..records.values import at, positive
from .groups import Group, SweepResults
from .recommend import Analysis, same_samples
from .run import BATCH_SIZE, Run

_UNSTEADY = 2  # times from the 10th to the 90th percentile of a run's steps
_VAGUE = 0.1  # of the rate: a wider interval is a note


def limits(sweep: SweepResults, analyses: Sequence[Analysis]) -> list[str]:
    """Which conclusions the runs do not allow."""
    notes = []
    if len(sweep.runs) > 1 and not sweep.varied:
        notes.append("nothing varied: the runs repeat one another")
    elif len(sweep.runs) > 1 and BATCH_SIZE not in sweep.varied:
        notes.append("no batch size is recommended: data.batch_size was the same in all runs")
    for analysis in analyses:
        notes += [f"{analysis.group.label}: {note}" for note in _of_group(analysis, BATCH_SIZE in sweep.varied)]
    without = [run.name for run in sweep.runs if run.status == "finished" and RATE not in run.values]
    if without:
        notes.append(f"finished without a throughput summary: {', '.join(without)}")
    notes += [f"{run.name}: {run.steps}" for run in sweep.runs if isinstance(run.steps, str)]
    return notes


def _of_group(analysis: Analysis, sizes_varied: bool) -> list[str]:
    group, count = analysis.group, len(analysis.group.sizes)
    notes = []
    if sizes_varied and count == 1:
        notes.append("one batch size was measured, so none is recommended")
    if count == 2:
        notes.append("two batch sizes are too few for a fit, so nothing is predicted beyond them")
    if analysis.fit and analysis.trusted is None:
        notes.append(f"the fit is not used: its error on sizes left out is {percent(analysis.error or 0)}")
    if vague := _sizes(group, _is_vague):
        notes.append(
            f"the rate at {vague} is not known to ± {percent(_VAGUE)}: the machine was busy, or the steps differ; a longer "
            "run knows more, and seed=0,1,2 repeats every run"
        )
    if disturbed := _sizes(group, is_disturbed):
        notes.append(f"the rate at {disturbed} may be too low: other programs disturbed all of the run")
    if unsteady := _sizes(group, _is_unsteady):
        notes.append(
            f"the rate at {unsteady} is not reliable: the 90th percentile of the steps is more than "
            f"{_UNSTEADY} times the 10th, as when other programs use the device; seed=0,1,2 repeats every run, and "
            "medians are taken"
        )
    if any(len(same_samples(group, size)) < count for size in group.sizes) and any(r.metrics for r in group.runs):
        notes.append("metrics are not compared between sizes that saw different numbers of samples")
    return notes


def _sizes(group: Group, is_so: Callable[[Run], bool]) -> str:
    """The batch sizes at which some run is so; empty if there is none."""
    return ", ".join(f"{size:,}" for size, runs in group.sizes.items() if any(map(is_so, runs)))


def _is_vague(run: Run) -> bool:
    rate, low, high = (run.values.get(f"{RATE}{end}") for end in ("", "_low", "_high"))
    return bool(rate and low and high and max(high / rate - 1, 1 - low / rate) > _VAGUE)


def is_disturbed(run: Run) -> bool:
    """Whether other programs disturbed all that was measured of a run."""
    bad, stretches = (positive(at(run.record, f"throughput.{name}")) for name in ("disturbed_stretches", "stretches"))
    return bool(bad and bad == stretches)


def _is_unsteady(run: Run) -> bool:
    """Of a run without an interval."""
    if f"{RATE}_low" in run.values:
        return False
    low, high = run.values.get("samples_per_sec_p10"), run.values.get("samples_per_sec_p90")
    return bool(low and high and high > _UNSTEADY * low)
