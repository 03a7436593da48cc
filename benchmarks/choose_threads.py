"""A step with one thread predicted from two, and with two from one: five models at five batch sizes.

    python benchmarks/choose_threads.py --root ../shared/data

For each model and number of threads a sweep of `experiment=throughput` runs, with OMP_NUM_THREADS in its environment, on an
idle machine. A step is predicted from the records of the other sweep (src/choice/host.py) and compared with what was
measured. Beside it stands the naive guess, a step divided or multiplied by the ratio of the threads. Prints a table and one
JSON line: `median_error` and `naive_error` over all cases, `by_model`, and `coverage` of the intervals. Finished sweeps in
the output folder are not run again. `--write` writes results/choose_threads.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from harness import write_result

from batchscope.choice.host import other_threads
from batchscope.choice.measured import Measured, measured
from batchscope.errors import exit_on_user_error

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "cnn": ("model=cnn", "data=mnist"),
    "mlp": ("model=mlp", "data=mnist"),
    "rnn": ("model=rnn_cell", "data=mnist"),
    "lstm": ("model=lstm_cell", "data=mnist"),
    "stacked_lstm": ("model=stacked_lstm", "data=mnist"),
}
SIZES = (8, 32, 128, 512, 1024)


def sweep(place: Path, threads: int, options: list[str]) -> Measured:
    """Run a sweep unless it is there; what it has measured."""
    if not (place / "report").is_dir():
        shutil.rmtree(place, ignore_errors=True)
        line = [sys.executable, str(ROOT / "train.py"), "-m", "experiment=throughput", *options]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        subprocess.run([*line, f"hydra.sweep.dir={place}"], cwd=ROOT, check=True, env=environment)
    return measured(place)[0]


def cases(model: str, one: Measured, two: Measured) -> list[dict[str, Any]]:
    """Each size, predicted both ways."""
    found = []
    for source, target in ((one, two), (two, one)):
        step = next(iter(target.steps.values()))
        threads = [next(iter(each.steps.values())).threads or 1 for each in (source, target)]
        predicted = other_threads(source, {**step.calibration, "threads": threads[1]})
        for size in sorted({*source.seconds, *target.seconds}):
            if size in source.seconds and size in target.seconds:
                true, guess = target.seconds[size].middle, predicted[size]
                naive = source.seconds[size].middle * threads[0] / threads[1]
                found.append(
                    {
                        "model": model,
                        "batch_size": size,
                        "from": threads[0],
                        "to": threads[1],
                        "measured_ms": 1e3 * true,
                        "predicted_ms": 1e3 * guess.middle,
                        "error": guess.middle / true - 1,
                        "naive_error": naive / true - 1,
                        "holds": guess.low <= true <= guess.high,
                    }
                )
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| model | batch | threads | measured ms | predicted ms | error | naive |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for case in found:
        times = f"{case['measured_ms']:.3g} | {case['predicted_ms']:.3g}"
        errors = f"{100 * case['error']:+.0f} % | {100 * case['naive_error']:+.0f} %"
        lines.append(
            f"| {case['model']} | {case['batch_size']:,} | {case['from']} → {case['to']} | {times} | {errors} |"
        )
    return "\n".join(lines)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    def error(cases: list[dict[str, Any]], key: str = "error") -> float:
        return round(median(abs(case[key]) for case in cases), 4)

    models = dict.fromkeys(case["model"] for case in found)
    return {
        "cases": len(found),
        "median_error": error(found),
        "naive_error": error(found, "naive_error"),
        "coverage": round(sum(case["holds"] for case in found) / len(found), 3),
        "by_model": {model: error([case for case in found if case["model"] == model]) for model in models},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench-choose-threads")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--write", action="store_true", help="write results/choose_threads.md")
    parser.add_argument("options", nargs="*", help="further options of the runs")
    args = parser.parse_args()
    common = [f"data.root={args.root}", f"data.batch_size={args.sizes}", *args.options]
    found = []
    for model in args.models.split(","):
        one, two = (
            sweep(args.out / model / f"threads-{threads}", threads, [*MODELS[model], *common]) for threads in (1, 2)
        )
        found += cases(model, one, two)
    result = summary(found)
    if args.write:
        write_result("choose_threads", table(found), {"summary": result, "cases": found})
    else:
        print("\n" + table(found) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    exit_on_user_error(main)
