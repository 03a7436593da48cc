"""How long a sweep of short runs takes, how much of it is not training, and the private memory of a run.

    python benchmarks/sweep_start.py --root ../shared/data --rounds 3

The runs are forked from a process that has imported torch and Lightning. With `--new-pythons` each run is a new Python for
comparison, and with `--older <python>` an older version does the same sweep. The variants take turns. Overhead is what a
sweep's wall time has beyond the training of its runs; its own start and its report are part of it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import median, sweep_line, write_result

ROOT = Path(__file__).resolve().parent.parent
NEW_PYTHONS = (
    "from batchscope.sweep import fork_server; fork_server.is_supported = lambda: False; "
    "from batchscope.train import main; main()"
)


def sweep(program: list[str], place: Path, options: list[str]) -> dict[str, Any]:
    """Do a sweep: its wall and processor time in s, the seconds of its runs' training, and their highest peak in GiB."""
    shutil.rmtree(place, ignore_errors=True)
    started, before = time.perf_counter(), os.times()
    done = subprocess.run(sweep_line(place, options, program), cwd=ROOT, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - started, os.times()
    assert done.returncode == 0, done.stderr
    records = [json.loads(file.read_text())["throughput"] for file in place.glob("*/run.json")]
    return {
        "seconds": seconds,
        "processor_seconds": after.children_user
        + after.children_system
        - before.children_user
        - before.children_system,
        "training": sum(one["fit_seconds"] for one in records),
        "runs": len(records),
        "peak_gib": max(one["memory_peak_gib"] for one in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="4,8,16,32,64,128,256,512")
    parser.add_argument("--new-pythons", action="store_true", help="also without the fork server")
    parser.add_argument("--older", help="the Python of an environment with an older version")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench-sweep-start")
    parser.add_argument("options", nargs="*", help="more options of the sweep: callbacks.until_known.seconds=2")
    args = parser.parse_args()
    variants = {
        "forked": [sys.executable, "-m", "batchscope.train"],
    }
    if args.new_pythons:
        variants["a new Python each"] = [sys.executable, "-c", NEW_PYTHONS]
    if args.older:
        variants["older version"] = [args.older, "-m", "batchscope.train"]
    options = ["experiment=throughput", "model=cnn", "data=mnist", f"data.root={args.root}"]
    options += [f"data.batch_size={args.sizes}", *args.options]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for turn in range(args.rounds):
        for name in list(variants)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(sweep(variants[name], args.out / "sweep", options))
            print(name, found[name][-1], flush=True)
    rows = ["| the runs are | sweep s | training s | beyond it, s a run | processor s | peak GiB |"]
    rows += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, each in found.items():
        beyond = median([(one["seconds"] - one["training"]) / one["runs"] for one in each])
        middle = {key: median([one[key] for one in each]) for key in each[0]}
        rows.append(
            f"| {name} | {middle['seconds']:.1f} | {middle['training']:.1f} | {beyond:.2f} | "
            f"{middle['processor_seconds']:.1f} | {middle['peak_gib']:.3f} |"
        )
    write_result("sweep_start", "\n".join(rows), {"sweeps": found, "sizes": args.sizes})


if __name__ == "__main__":
    main()
