"""Does the batch size with the highest rate reach a target first?

    python benchmarks/time_to_target.py --root ../shared/data

Each case is a sweep of experiment=time_to_target over sizes from 16 to 4,096, one or two learning rates and three seeds. The size
with the highest rate is compared with the size that was measured to be first. It is as good where it takes at most 1.3 times the
best time; the measured time of a size is the median over the seeds, each at its best rate. A size that was ended early is not.
Rendered digits stand in for MNIST in two cases, and the sequences of the adding problem are short, so that all of it takes a
quarter of an hour. Interrupted, it continues: the runs that are done are kept below
outputs/bench-time-to-target.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import arguments, folder_of, rows, train, write_result

from batchscope.analysis.answer import Answer
from batchscope.analysis.report import analyse

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
            sys.exit(f"the search below {place / str(seed)} failed; the next start tries it again")
    return next((of_group for of_group in analyse([place]).answers if of_group.arrivals), None)


def compared(answer: Answer) -> dict[str, Any]:
    """The fastest and the best size of a case, with what the fastest takes in times of the best; None if unknown."""
    arrivals = answer.arrivals
    times = {size: one.seconds for size, one in arrivals.typical.items()}
    best = min(times, key=lambda size: times[size], default=None)
    fastest = max(arrivals.sizes, key=answer.group.rates.rate)
    return {
        "target": arrivals.target,
        "load": answer.group.rates.load,
        "seconds": times,
        "samples_per_sec": {size: answer.group.rates.rate(size) for size in sorted(arrivals.sizes)},
        "first": best,
        "fastest": {"size": fastest, "times": times[fastest] / times[best] if best and fastest in times else None},
    }


def row(name: str, found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return [name, *5 * ["–"]]
    of, first = found["fastest"], found["first"]
    cells = [name, found["target"], f"{of['size']:,}", f"{of['times']:.2f}" if of["times"] else f"> {WITHIN}"]
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
    head = ["case", "target", "highest rate", "× best", "first", "after"]
    table = rows(head, [row(name, one) for name, one in found.items()], words=2)
    times = [one and one["fastest"]["times"] for one in found.values()]
    good = sum(each is not None and each <= WITHIN for each in times)
    table += (
        f"\n\nThe size with the highest rate is within {WITHIN} × of the best time in {good} of {len(found)} cases."
    )
    if loaded := [name for name, one in found.items() if one and one["load"]]:
        table += f" Other programs took much of the processor meanwhile, so times say little: {', '.join(loaded)}."
    write_result("time_to_target", table, {"cases": found}, args)


if __name__ == "__main__":
    main()
