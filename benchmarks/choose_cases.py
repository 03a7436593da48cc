"""Which device for three trainings? Writes the tables and plots of docs/choosing-a-device.md.

    python benchmarks/choose_cases.py --root ../shared/data
    python benchmarks/choose_cases.py --from outputs/choose-cases     # from an earlier measurement's records

Measures a small CNN, an LSTM and a ResNet-50 on images of CIFAR's size with `batchscope choose`, on this machine, and
predicts the devices of docs/prices.yaml. About four minutes on two cores; nothing else should run meanwhile. The ResNet's
images are those of MNIST in 32 × 32 pixels: time does not depend on what is in them.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import fill_in, machine, write_result

from batchscope.choice.catalogue import find_device
from batchscope.files import set_aside

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "choosing-a-device.md"
DEVICES = ["--devices", "t4,l4,l40s,a100,h100,tpu-v5e", "--prices", "docs/prices.yaml"]
CASES = {  # the options of the training, and the flags of choose
    "cnn": (["model=cnn", "data=mnist"], ["--epochs", "10"]),
    "lstm": (["model=lstm_cell", "data=sequential_mnist"], ["--epochs", "20"]),
    "resnet50": (
        ["model=torchvision", "model.name=resnet50", "model.image_size=32", "data=mnist"],
        ["--epochs", "100", "--deadline", "4h"],
    ),
}
WIDTH = 100  # columns


def choose(words: list[str], out: Path) -> str:
    """What the command prints, its files in `out`."""
    command = [sys.executable, "-m", "batchscope", "choose", *words, "--out", str(out)]
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def devices() -> str:
    """What the datasheets say of the devices of the cases."""
    lines = ["| device | fp32 cores | clock | fp32 | fp16 or bf16 | memory | bandwidth | power | fp32 FLOP/byte |"]
    lines.append("| --- " + "| ---: " * 8 + "|")
    for name in [*DEVICES[1].split(","), "rtx4090", "b200"]:
        device = find_device(name)
        peaks = device.flops_per_sec
        half = max((peaks[key] for key in ("fp16", "bf16") if key in peaks), default=None)
        cores = device.sms and device.cores_per_sm and device.sms * device.cores_per_sm
        cells = [
            name,
            f"{cores:,}" if cores else "",
            f"{device.clock_hz / 1e9:.2f} GHz" if device.clock_hz else "",
            f"{peaks['fp32'] / 1e12:.1f} TFLOP/s" if "fp32" in peaks else "",
            f"{half / 1e12:,.0f} TFLOP/s" if half else "",
            f"{device.memory_bytes / 2**30:.0f} GB",
            f"{device.bytes_per_sec / 1e12:.2f} TB/s",
            f"{device.tdp_w:.0f} W" if device.tdp_w else "",
            f"{peaks['fp32'] / device.bytes_per_sec:.0f}" if "fp32" in peaks else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "choice"
            if args.earlier is None:
                text = choose([*options, f"data.root={args.root}", *flags, *DEVICES], out)
                measured = Path(re.search(r"^measured +(\S+)$", text, re.MULTILINE)[1])
                if (kept / name).exists():
                    set_aside(kept / name)
                kept.mkdir(parents=True, exist_ok=True)
                shutil.move(ROOT / measured, kept / name)
            else:
                text = choose([str(kept / name), *flags, *DEVICES], out)
            shown = re.split(r"\n\n(?:plot|measured) +\S+$", text, flags=re.MULTILINE)[0].strip("\n")
            made[name] = f"```text\n{shown}\n```"
            numbers[name] = json.loads((out / "choice.json").read_text(encoding="utf-8"))
            if name == "resnet50":
                shutil.copy(out / "choice.png", DOCS / "choosing-a-device.png")
    fill_in(PAGE, made | {"machine": f"{machine()}.", "devices": devices()})
    write_result("choose_cases", "\n\n".join(f"**{name}**\n\n{block}" for name, block in made.items()), numbers)


if __name__ == "__main__":
    main()
