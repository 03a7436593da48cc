"""Which device is right for two trainings? Writes the tables of docs/choosing-a-device.md, and checks predictions on a GPU.

    python benchmarks/choose.py --root ../shared/data
    python benchmarks/choose.py --measured DIR DIR # predicts again from earlier measurements, in seconds
    python benchmarks/choose.py --device cuda      # this GPU's steps beside the CPU's prediction of them

The small CNN was also measured on an H200 with another torch (benchmarks/log.md, "the first minutes on CUDA"); the page shows
those steps beside the prediction from the CPU.

Measures a small CNN and a ResNet-50 on images of CIFAR's size with `batchscope choose`, on this machine, and predicts five
cards. About three minutes on two cores; nothing else should run meanwhile. The ResNet's images are those of MNIST in
32 × 32 pixels: the time does not depend on the content.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness import ROOT, arguments, fill_in, machine_of, rows, write_result

from batchscope.choice.measured import read_training
from batchscope.choice.step import Source, step_on
from batchscope.hardware.datasheet import Datasheet, find_card

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
# By batch size, the median step of the CNN on an H200 in ms, as benchmarks/log.md has it.
H200_MS = {32: 5.09, 64: 3.63, 128: 3.25, 256: 4.45, 512: 4.58, 1024: 5.21, 2048: 5.25, 4096: 6.13, 8192: 11.6}
STEPS_HEAD = ["batch", "measured, ms", "predicted, ms", "interval", "holds"]


def choose(*words: str) -> str:
    """The output of `batchscope choose`."""
    command = [sys.executable, "-m", "batchscope", "choose", *words]
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def measured(text: str) -> Path:
    """The folder that the command's last line names."""
    return ROOT / text.splitlines()[-1].removeprefix("measured ")


def check(args: argparse.Namespace) -> Path:
    """Measure both devices, and compare the GPU's steps with the prediction from the CPU; the folder of the measurement.

    In the smallest case a T4 stands in for the GPU.
    """
    options, sizes = (SMALLEST[0][:-1], "8,16") if args.smallest else (CASES["cnn"][0], "64,512,4096")
    text = choose(*options, f"data.root={args.root}", f"data.batch_size={sizes}", "--epochs", "10")
    training, _ = read_training([measured(text)])
    cards = [(source.device, source.sizes) for source in training.sources if source.device.kind == "cuda"]
    cards += [(find_card("t4"), training.sources[0].sizes)] if args.smallest else []
    lines = []
    for card, steps in cards:
        for source in (source for source in training.sources if source.device is not card):
            lines += compared(source, card, {size: 1e3 * step.seconds.middle for size, step in steps.items()})
    assert lines, text
    write_result("choose_check", f"```text\n{text.strip()}\n```\n\n{rows(STEPS_HEAD, lines)}", {"checks": lines}, args)
    return measured(text)


def compared(source: Source, card: Datasheet, measured_ms: Mapping[int, float]) -> list[list]:
    """A row for each batch size: the step of a card as measured on it, and as predicted from the source."""
    lines = []
    for size, ms in measured_ms.items():
        low, middle, high = (1e3 * end for end in step_on(source, card, size).seconds.ends())
        holds = "yes" if low <= ms <= high else "**no**"
        lines.append([f"{size:,}", f"{ms:.3g}", f"{middle:.3g}", f"{low:.3g} to {high:.3g}", holds])
    return lines


def main() -> None:
    parser = arguments(__doc__, device=True)
    parser.add_argument("--measured", nargs=len(CASES), type=Path, metavar="DIR", help="what an earlier run measured")
    args = parser.parse_args()
    if args.device == "cuda":
        check(args)
        return
    texts, numbers, folders = {}, {}, dict(zip(CASES, args.measured or (), strict=False))
    for name, (options, flags) in {"cnn": SMALLEST}.items() if args.smallest else CASES.items():
        folder = folders.get(name) or (check(args) if args.smallest else None)
        folder = folder or measured(choose(*options, f"data.root={args.root}", *flags, *FLAGS))
        words = [str(folder), *flags, *FLAGS]
        texts[name] = f"```text\n{choose(*words).strip()}\n```"
        numbers[name] = json.loads(choose(*words, "--json"))
        if name == "cnn" and not args.smallest:
            source = read_training([folder])[0].sources[0]
            numbers["h200"] = compared(source, find_card("h200"), H200_MS)
    parts = [f"**{name}**\n\n{block}" for name, block in texts.items()]
    if not args.smallest:
        table = rows(STEPS_HEAD, numbers["h200"])
        parts.append(f"**cnn, steps on an H200**, predicted from this CPU\n\n{table}")
        fill_in(PAGE, {"resnet50": texts["resnet50"], "h200": table, "machine": f"{machine_of('choose_cases', args)}."})
    write_result("choose_cases", "\n\n".join(parts), numbers, args)


if __name__ == "__main__":
    main()
