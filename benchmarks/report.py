"""The time of a full report on 200 runs: reading, rates, answer, plots, tables, page and TensorBoard.

    python benchmarks/report.py
    python benchmarks/report.py --runs 50

The records are synthetic: 20 models at 10 batch sizes, each with a step file of 20 windows that share passes, and a file
of validations. One report is written first, so that imports and caches are not measured.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from batchscope.analysis import write_report
from tests.support.synthetic_runs import write_curve, write_run, write_steps

SIZES, WINDOWS, STEPS = [4 * 2**n for n in range(10)], 20, 25


def write_runs(folder: Path, count: int) -> None:
    """`count` runs in `folder`."""
    random = np.random.default_rng(0)
    drift = np.cumsum(random.normal(0, 0.01, WINDOWS))
    for number in range(count):
        size, model = SIZES[number % len(SIZES)], f"model_{number // len(SIZES)}"
        ms = 4 + 0.1 * size
        use = {"mfu": 0.4 * 0.1 * size / ms, "processor_time_pct": 95.0, "memory_peak_gib": 0.5 + size / 1000}
        run = write_run(folder / str(number), size, ms, model=model, metrics={"test/acc": 0.98}, throughput=use)
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**record, "evaluated": {"test": 10_000}}))
        windows = ms * np.exp(drift + random.normal(0, 0.03, (STEPS, WINDOWS)).mean(axis=0))
        write_steps(run, [[value] * STEPS for value in windows], rounds=list(range(WINDOWS)))
        write_curve(run, [(10 * n, 1 - 0.5**n) for n in range(1, 6)], ms)


def main() -> None:
    """Write the runs, and print the seconds of a report on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder) / "few", len(SIZES))
        write_report([Path(folder) / "few"], Path(folder) / "first")
        write_runs(Path(folder) / "runs", args.runs)
        begin = time.perf_counter()
        write_report([Path(folder) / "runs"], Path(folder) / "report")
        print(f"{args.runs} runs: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
