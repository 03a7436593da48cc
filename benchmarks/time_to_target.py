"""Does the gradient noise scale name the batch size that reaches a target first?

    python benchmarks/time_to_target.py --root ../shared/data

Each case is a sweep of experiment=time_to_target over sizes from 16 to 4,096, one or two learning rates and three seeds. The noise
scale and the rates of the runs name a size: that with the largest goodput. It is compared with the size that was measured to be
first, and so is the size with the highest rate. A case is right where the named size takes at most 1.3 times the best time;
the measured time of a size is the median over the seeds, each at its best rate. A size that was ended early is wrong.
Rendered digits stand in for MNIST in two cases, and the sequences of the adding problem are short, so that all of it takes a
quarter of an hour. A case without an answer is wrong. Interrupted, it continues: the runs that are done are kept below
outputs/bench-time-to-target.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import arguments, folder_of, rows, train, write_result

from batchscope.analysis.answer import Answer
from batchscope.analysis.progress import progress_of
from batchscope.analysis.report import analyse
from batchscope.records.formatting import significant

WITHIN = 1.3  # × the best time
SIZES = "search.sizes=[16,64,256,1024,4096]"
SEEDS = 3
ONE_RATE, TWO_RATES = "search.rates=[0.25]", "search.rates=[0.25,1]"
CASES: dict[str, list[str]] = {
    "cnn on MNIST": ["model=cnn", "data=mnist", "data.num_val=2000", "target=0.96", ONE_RATE],
    "mlp on MNIST": ["model=mlp", "data=mnist", "data.num_val=2000", "target=0.95", TWO_RATES],
    "cnn on digits": ["model=cnn", "data=digits", "data.num_val=2000", "target=0.96", ONE_RATE],
    "mlp on digits": ["model=mlp", "data=digits", "data.num_val=2000", "target=0.95", TWO_RATES],
    "lstm on adding": [
        *("model=stacked_lstm", "model.hidden_size=64", "data=adding", "data.sequence_length=20"),
        *("target_metric=val/loss", "target=0.02", TWO_RATES),
    ],
}
SMALLEST = {
    "mlp on digits": [
        *("model=mlp", "model.hidden_sizes=[8]", "data=digits", "data.num_train=300", "data.num_val=50", "target=0.4"),
        *("search.sizes=[8,32]", "search.rates=[1]"),
    ]
}


def sweep(place: Path, words: Sequence[str], seeds: int) -> Answer | None:
    """Run a case with each seed, or what is left of it; its answer, None where no two sizes were measured."""
    for seed in range(seeds):
        line = ["experiment=time_to_target", *words, f"seed={seed}", "logger=[none,csv]"]
        if not train(place / str(seed), line, search=True):
            sys.exit(f"a run below {place} failed; the next start tries it again")
    return next(iter(analyse([place]).answers), None)


def compared(answer: Answer) -> dict[str, Any]:
    """The named, the fastest and the best size of a case, with what they take in times of the best; None if unknown."""
    arrivals, progress = answer.arrivals, progress_of(answer.group.sizes, answer.rates)
    times = {size: one.seconds for size, one in arrivals.typical.items()}
    best = min(times, key=lambda size: times[size], default=None)
    named = max(progress.updates, key=progress.goodput) if progress else None
    fastest = max(arrivals.sizes, key=answer.rates.rate)

    def in_best_times(size: int | None) -> float | None:
        return times[size] / times[best] if best and size in times else None

    return {
        "target": arrivals.target,
        "load": answer.rates.load,
        "seconds": times,
        "samples_per_sec": {size: answer.rates.rate(size) for size in sorted(arrivals.sizes)},
        "noise_scale": progress and [progress.scale.low, progress.scale.value, progress.scale.high],
        "first": best,
        "named": {"size": named, "times": in_best_times(named)},
        "fastest": {"size": fastest, "times": in_best_times(fastest)},
    }


def row(name: str, found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return [name, *8 * ["–"]]
    scale = found["noise_scale"]
    shown = f"{significant(scale[1])} ({significant(scale[0])} to {significant(scale[2])})" if scale else "not known"
    cells = [name, found["target"], shown]
    for of in (found["named"], found["fastest"]):
        cells += [f"{of['size']:,}" if of["size"] else "–", f"{of['times']:.2f}" if of["times"] else f"> {WITHIN}"]
    first = found["first"]
    return cells + ([f"{first:,}", f"{found['seconds'][first]:.1f} s"] if first else ["–", "not reached"])


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """What each case has shown; None for one without an answer."""
    if args.smallest:
        cases, common = SMALLEST, []
    else:
        cases, common = CASES, [SIZES]
    found, out = {}, folder_of("bench-time-to-target", args)
    for name, words in cases.items():
        root = [] if "data=adding" in words else [f"data.root={args.root}"]
        answer = sweep(out / name.replace(" ", "-"), [*common, *words, *root], 1 if args.smallest else SEEDS)
        found[name] = compared(answer) if answer and answer.arrivals else None
    return found


def main() -> None:
    args = arguments(__doc__).parse_args()
    found = measure(args)
    head = ["case", "target", "noise scale", "named", "× best", "highest rate", "× best", "first", "after"]
    table = rows(head, [row(name, one) for name, one in found.items()], words=2)
    times = [one and one["named"]["times"] for one in found.values()]
    right = sum(each is not None and each <= WITHIN for each in times)
    table += f"\n\nThe named size is within {WITHIN} × of the best time in {right} of {len(found)} cases."
    if loaded := [name for name, one in found.items() if one and one["load"]]:
        table += f" Other programs took much of the processor meanwhile, so times say little: {', '.join(loaded)}."
    write_result("time_to_target", table, {"cases": found}, args)


if __name__ == "__main__":
    main()
