"""Does the same sweep give the same answer tomorrow? Sweeps of the CNN, half of them beside a busy process.

    python benchmarks/repeated_sweep.py --root ../shared/data --repetitions 10

Beside every other sweep, a process keeps one core busy in bursts of random length. The table says which batch size each
sweep recommends, how many of these lie within one power of two of the most frequent one, how long a sweep takes, and how
often the interval of a rate holds the median rate of all sweeps.
"""

import argparse
import contextlib
import math
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import median, sweep_line, write_result

from batchscope.analysis import analyse

ROOT = Path(__file__).resolve().parent.parent
BURSTS = """
import random, time
of = random.Random({seed})
while True:
    end = time.perf_counter() + of.uniform(0.2, 4)
    while time.perf_counter() < end:
        pass
    time.sleep(of.uniform(0.2, 4))
"""


@contextlib.contextmanager
def busy_process(seed: int) -> Iterator[None]:
    """A process that keeps one core busy in bursts of 0.2 to 4 s, with pauses as long."""
    process = subprocess.Popen([sys.executable, "-c", BURSTS.format(seed=seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def sweep(place: Path, options: list[str]) -> dict[str, Any]:
    """Do the sweep; its wall time, the recommended size (None where it is undecided), and the rate of each size with its interval."""
    shutil.rmtree(place, ignore_errors=True)
    started = time.perf_counter()
    done = subprocess.run(sweep_line(place, options), cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    report = analyse([place])
    columns = ["batch_size", *(f"samples_per_sec{end}" for end in ("_low", "", "_high"))]
    frame = report.frame.reindex(columns=columns).astype(object)
    rates = {size: ends for size, *ends in frame.where(frame.notna(), None).to_numpy().tolist()}
    found = report.answers[0]
    return {"seconds": seconds, "size": found.size, "headline": found.lines[0], "rates": rates}


def covered(sweeps: list[dict[str, Any]]) -> list[bool]:
    """For each rate of each sweep, whether its interval holds the median rate of that size over all sweeps."""
    middle = {size: median([one["rates"][size][1] for one in sweeps]) for size in sweeps[0]["rates"]}
    return [
        low <= middle[size] <= high
        for one in sweeps
        for size, (low, _, high) in one["rates"].items()
        if low is not None and high is not None
    ]


def table(sweeps: list[dict[str, Any]]) -> str:
    sizes = [one["size"] for one in sweeps if one["size"]]
    usual = Counter(sizes).most_common(1)[0][0] if sizes else 1
    near = sum(abs(math.log2(size / usual)) <= 1 for size in sizes)
    held = covered(sweeps)
    width = median(
        [(high - low) / rate / 2 for one in sweeps for low, rate, high in one["rates"].values() if low and high]
    )
    quiet, beside = ([one["seconds"] for one in sweeps if one["busy"] is busy] for busy in (False, True))
    rows = ["| sweep | beside it | s | recommended |", "| ---: | --- | ---: | ---: |"]
    rows += [
        f"| {number} | {'a busy process' if one['busy'] else '–'} | {one['seconds']:.0f} | {one['size'] or 'none'} |"
        for number, one in enumerate(sweeps, 1)
    ]
    rows += ["", f"Within one power of two of {usual}, the most frequent: {near} of {len(sizes)} answers."]
    rows.append(
        f"Intervals that hold the median rate of all sweeps: {sum(held)} of {len(held)} ({sum(held) / len(held):.0%})."
    )
    rows.append(f"Median half-width of an interval: {width:.0%}.")
    rows.append(
        f"Median time of a sweep: {median(quiet):.0f} s"
        + (f", beside the process {median(beside):.0f} s." if beside else ".")
    )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--sizes", default="4,8,16,32,64,128,256,512")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench-repeated-sweep")
    args = parser.parse_args()
    options = ["experiment=throughput", "model=cnn", "data=mnist", f"data.root={args.root}"]
    options.append(f"data.batch_size={args.sizes}")
    sweeps: list[dict[str, Any]] = []
    for number in range(args.repetitions):
        busy = number % 2 == 1
        with busy_process(number) if busy else contextlib.nullcontext():
            sweeps.append({"busy": busy, **sweep(args.out / str(number), options)})
        print(f"{number + 1}: {sweeps[-1]['seconds']:.0f} s, {sweeps[-1]['headline']}", flush=True)
    write_result("repeated_sweep", table(sweeps), {"sweeps": sweeps, "sizes": args.sizes})


if __name__ == "__main__":
    main()
