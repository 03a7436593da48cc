"""Does the batch size with the highest rate reach a target first?

    python benchmarks/time_to_target.py --root ../shared/data

Each case is a sweep of experiment=time_to_target over sizes from 16 to 4,096, one or two learning rates and three seeds. The size
with the highest rate is compared with the size that reaches the target first. It is as good if it takes at most 1.3 times the
best time; the time of a size is the median over the seeds, each at its best learning rate. A size that was ended early is not as
good. Two cases use rendered digits in place of MNIST, and the sequences of the adding problem are short, so that the benchmark
takes a quarter of an hour. After an interruption it continues: finished runs are kept below
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


def sweep(folder: Path, words: Sequence[str], seeds: int) -> Answer | None:
    """Run a case with each seed, except finished runs; its answer, or None if no two sizes were measured."""
    for seed in range(seeds):
        line = ["experiment=time_to_target", *words, f"seed={seed}", "logger=[none,csv]"]
        if not train(folder / str(seed), line, search=True):
            sys.exit(f"the search below {folder / str(seed)} failed; the next start tries it again")
    return next((of_group for of_group in analyse([folder]).answers if of_group.arrivals), None)


def compared(answer: Answer) -> dict[str, Any]:
    """The fastest and the best size of a case, and the time of the fastest ÷ that of the best; None if unknown."""
    arrivals = answer.arrivals
    times = {size: arrival.seconds for size, arrival in arrivals.typical.items()}
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


def row(name: str, result: Mapping[str, Any] | None) -> list[str]:
    if result is None:
        return [name, *5 * ["–"]]
    peak, first = result["fastest"], result["first"]
    cells = [name, result["target"], f"{peak['size']:,}", f"{peak['times']:.2f}" if peak["times"] else f"> {WITHIN}"]
    return cells + ([f"{first:,}", f"{result['seconds'][first]:.1f} s"] if first else ["–", "not reached"])


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Measure each case; its result, or None without an answer."""
    if args.smallest:
        cases, common = SMALLEST, []
    else:
        cases, common = CASES, [SIZES]
    results, out = {}, folder_of("bench-time-to-target", args)
    for name, words in cases.items():
        root = [] if "data=adding" in words else [f"data.root={args.root}"]
        answer = sweep(out / name.replace(" ", "-"), [*common, *words, *root], 1 if args.smallest else SEEDS)
        results[name] = compared(answer) if answer and answer.arrivals else None
    return results


def main() -> None:
    args = arguments(__doc__).parse_args()
    results = measure(args)
    head = ["case", "target", "highest rate", "× best", "first", "after"]
    table = rows(head, [row(name, result) for name, result in results.items()], words=2)
    times = [result and result["fastest"]["times"] for result in results.values()]
    within = sum(ratio is not None and ratio <= WITHIN for ratio in times)
    table += (
        f"\n\nThe size with the highest rate is within {WITHIN} × of the best time in {within} of {len(results)} cases."
    )
    if loaded := [name for name, result in results.items() if result and result["load"]]:
        table += f" Other programs took much of the processor meanwhile, so times say little: {', '.join(loaded)}."
    write_result("time_to_target", table, {"cases": results}, args)


if __name__ == "__main__":
    main()
