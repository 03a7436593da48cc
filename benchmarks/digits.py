"""The time to render 60,000 digits, and to read them from the cache.

python benchmarks/digits.py --rounds 5
"""

import argparse
import tempfile
import time
from pathlib import Path

from harness import median, write_result

from batchscope.data.digits import cached_digits, render_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    render_digits(100, seed=0)  # loads the fonts, once a process
    rendered, cached = [], []
    with tempfile.TemporaryDirectory() as folder:
        cached_digits(Path(folder), 60_000, 0)
        for seed in range(args.rounds):
            started = time.perf_counter()
            render_digits(60_000, seed)
            rendered.append(time.perf_counter() - started)
            started = time.perf_counter()
            cached_digits(Path(folder), 60_000, 0)
            cached.append(time.perf_counter() - started)
    lines = ["| 60,000 digits | median s | min s |", "| --- | ---: | ---: |"]
    lines += [f"| {n} | {median(v):.2f} | {min(v):.2f} |" for n, v in (("rendered", rendered), ("from cache", cached))]
    write_result("digits", "\n".join(lines), {"rendered": rendered, "cached": cached})


if __name__ == "__main__":
    main()
