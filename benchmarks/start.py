"""How long `python train.py` takes to refuse a mistake: whole processes, from start to exit.

python benchmarks/start.py --rounds 10
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import median, write_result

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
LINES = ["modle=cnn", "data.batch_sise=3", "model=cnn data=adding", "-m data.batch_size=64,128,256,0"]


def seconds(line: str, folder: str) -> float:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, str(TRAIN), *line.split()], cwd=folder, capture_output=True, check=False)
    elapsed = time.perf_counter() - started
    assert done.returncode == 1, done.stderr
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    times: dict[str, list[float]] = {line: [] for line in LINES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for line, values in times.items():
                values.append(seconds(line, folder))
    lines = ["| python train.py … | median s | max s |", "| --- | ---: | ---: |"]
    lines += [f"| `{line}` | {median(values):.2f} | {max(values):.2f} |" for line, values in times.items()]
    write_result("start", "\n".join(lines), {"seconds": times})


if __name__ == "__main__":
    main()
