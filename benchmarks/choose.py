"""Which device for two trainings? Writes the tables of docs/choosing-a-device.md, and checks predictions on a GPU.

    python benchmarks/choose.py --root ../shared/data
    python benchmarks/choose.py --device cuda      # this GPU's steps, as those of the CPU predict them

Measures a small CNN and a ResNet-50 on images of CIFAR's size with `batchscope choose`, on this machine, and predicts five
cards. About three minutes on two cores; nothing else should run meanwhile. The ResNet's images are those of MNIST in
32 × 32 pixels: time does not depend on what is in them.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT, arguments, fill_in, machine, rows, write_result

from batchscope.choice.measured import read_training
from batchscope.choice.step import step_on
from batchscope.hardware.datasheet import find_card

PAGE = ROOT / "docs" / "choosing-a-device.md"
# Modal's price list of 2026-05-07: an hour of the GPU alone, in dollars.
PRICES = {"t4": 0.5904, "l4": 0.7992, "l40s": 1.9512, "a100": 2.4984, "h100": 3.9492}
PRICED = [word for card, price in PRICES.items() for word in ("--price", f"{card}={price}")]
FLAGS = ["--devices", ",".join(PRICES), *PRICED]
RESNET = ["model=torchvision", "model.name=resnet50", "model.image_size=32"]
CASES = {  # the options of the training, and the flags of choose
    "cnn": (["model=cnn", "data=mnist"], ["--epochs", "10"]),
    "resnet50": ([*RESNET, "data=mnist"], ["--epochs", "100", "--start-up", "300"]),
}
SMALLEST = (["model=mlp", "data=digits", "data.num_train=256", "data.batch_size=8,16"], ["--epochs", "10"])
WIDTH = 100  # columns


def choose(*words: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "batchscope", "choose", *words]
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def measured(text: str) -> Path:
    """The folder that the command's last line names."""
    return ROOT / text.splitlines()[-1].removeprefix("measured ")


def check(args: argparse.Namespace) -> Path:
    """Measure both devices, and hold the GPU's steps against what the CPU's predict; the folder of the measurement.

    In the smallest case a T4 stands in for the GPU.
    """
    options, sizes = (SMALLEST[0][:-1], "8,16") if args.smallest else (CASES["cnn"][0], "64,512,4096")
    text = choose(*options, f"data.root={args.root}", f"data.batch_size={sizes}", "--epochs", "10")
    training, _ = read_training([measured(text)])
    cards = [(source.device, source.sizes) for source in training.sources if source.device.kind == "cuda"]
    cards += [(find_card("t4"), training.sources[0].sizes)] if args.smallest else []
    lines = []
    for card, there in cards:
        for source in (source for source in training.sources if source.device is not card):
            for size, one in there.items():
                low, middle, high = (1e3 * end for end in step_on(source, card, size).seconds.ends())
                ms = 1e3 * one.seconds.middle
                holds = "yes" if low <= ms <= high else "**no**"
                lines.append([size, f"{ms:.3g}", f"{middle:.3g}", f"{low:.3g} to {high:.3g}", holds])
    assert lines, text
    head = ["batch", "measured, ms", "predicted, ms", "interval", "holds"]
    write_result("choose_check", f"```text\n{text.strip()}\n```\n\n{rows(head, lines)}", {"checks": lines}, args)
    return measured(text)


def main() -> None:
    args = arguments(__doc__, device=True).parse_args()
    if args.device == "cuda":
        check(args)
        return
    made, numbers = {}, {}
    for name, (options, flags) in {"cnn": SMALLEST}.items() if args.smallest else CASES.items():
        place = check(args) if args.smallest else measured(choose(*options, f"data.root={args.root}", *flags, *FLAGS))
        words = [str(place), *flags, *FLAGS]
        made[name] = f"```text\n{choose(*words).strip()}\n```"
        numbers[name] = json.loads(choose(*words, "--json"))
    if not args.smallest:
        fill_in(PAGE, {"resnet50": made["resnet50"], "machine": f"{machine()}."})
    write_result("choose_cases", "\n\n".join(f"**{name}**\n\n{block}" for name, block in made.items()), numbers, args)


if __name__ == "__main__":
    main()
