"""Which device for two trainings? One of the tables is also the example of docs/choosing-a-device.md.

    python benchmarks/choose_cases.py --root ../shared/data
    python benchmarks/choose_cases.py --from outputs/choose-cases     # from an earlier measurement's records

Measures a small CNN and a ResNet-50 on images of CIFAR's size with `batchscope choose`, on this machine, and predicts five
cards. About three minutes on two cores; nothing else should run meanwhile. The ResNet's images are those of MNIST in
32 × 32 pixels: time does not depend on what is in them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import fill_in, machine, write_result

from batchscope.files import set_aside

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "choosing-a-device.md"
# Modal's price list of 2026-05-07: an hour of the GPU alone, in dollars.
PRICES = {"t4": 0.5904, "l4": 0.7992, "l40s": 1.9512, "a100": 2.4984, "h100": 3.9492}
FLAGS = [
    "--devices",
    ",".join(PRICES),
    *(word for each in PRICES.items() for word in ("--price", "{}={}".format(*each))),
]
CASES = {  # the options of the training, and the flags of choose
    "cnn": (["model=cnn", "data=mnist"], ["--epochs", "10"]),
    "resnet50": (
        ["model=torchvision", "model.name=resnet50", "model.image_size=32", "data=mnist"],
        ["--epochs", "100", "--start-up", "300"],
    ),
}
WIDTH = 100  # columns


def choose(*words: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "batchscope", "choose", *words]
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of the datasets")
    parser.add_argument(
        "--from", dest="earlier", type=Path, help="folder of an earlier measurement, not measured again"
    )
    args = parser.parse_args()
    kept = args.earlier or ROOT / "outputs" / "choose-cases"
    made, numbers = {}, {}
    for name, (options, flags) in CASES.items():
        if args.earlier is None:
            text = choose(*options, f"data.root={args.root}", *flags, *FLAGS)
            if (kept / name).exists():
                set_aside(kept / name)
            kept.mkdir(parents=True, exist_ok=True)
            shutil.move(ROOT / text.splitlines()[-1].removeprefix("measured "), kept / name)
        words = [str(kept / name), *flags, *FLAGS]
        made[name] = f"```text\n{choose(*words).strip()}\n```"
        numbers[name] = json.loads(choose(*words, "--json"))
    fill_in(PAGE, made | {"machine": f"{machine()}."})
    write_result("choose_cases", "\n\n".join(f"**{name}**\n\n{block}" for name, block in made.items()), numbers)


if __name__ == "__main__":
    main()
