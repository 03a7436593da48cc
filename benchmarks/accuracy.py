"""Test accuracy on the real MNIST over seeds: `experiment=mnist_99`, and train.py with its defaults.

python benchmarks/accuracy.py --root ../shared/data --seeds 3
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import write_result

from batchscope.records.read import read

HERE = Path(__file__).resolve().parent
COMMANDS = {"experiment=mnist_99": ["experiment=mnist_99"], "(the defaults)": []}


def run(words: list[str], root: str, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        line = [*words, f"data.root={root}", f"seed={seed}", f"hydra.run.dir={folder}/run", "callbacks.progress=null"]
        command = [sys.executable, str(HERE.parent / "train.py"), *line]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return read(Path(folder) / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    lines = ["| python train.py … | seed | dataset | epochs | test accuracy | seconds of fit |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    records = []
    for name, words in COMMANDS.items():
        for seed in range(args.seeds):
            record = run(words, args.root, seed)
            records.append({"command": name, "seed": seed, **{k: record[k] for k in ("metrics", "epochs", "dataset")}})
            facts = f"{record['dataset']['name']} | {record['epochs']} | {record['metrics']['test/acc']:.2%}"
            lines.append(f"| {name} | {seed} | {facts} | {record['fit_seconds']:.1f} |")
            print(lines[-1], flush=True)
    write_result("accuracy", "\n".join(lines), {"runs": records})


if __name__ == "__main__":
    main()
