"""Write smaller measurements than those of the shared folder, in the form that `main.py` reads, from a checkout of NeuSight.

    git clone https://github.com/sitar-lab/NeuSight && git -C NeuSight checkout 6945927
    python benchmarks/device_choice/neusight.py NeuSight outputs/neusight
    python benchmarks/device_choice/steps.py --fit ../shared/data/gpu_kernels --small outputs/neusight

NeuSight's own model was trained on these measurements: P4, P100, T4, V100 and A100 (of 40 GB, for convolutions 80), forward, float32, PyTorch 2.1, dimensions drawn at
random, also odd ones; convolutions of 3 × 3 with a stride of 1, by the fastest of cuDNN's algorithms, without TF32. NeuSight's N and K
are K and N here. NeuSight does not state the power limits: these are the maker's.
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from batchscope.errors import UserError, exit_on_user_error, refuse_in_one_line

DATA, CARDS = "scripts/asplos/data/dataset/train", "scripts/asplos/data/dataset/test/device_configs"
OPS = ("linear", "bmm", "add", "tanh", "softmax", "conv")  # of which a file is in the repository for each card
COLUMNS = ["op", "B", "M", "N", "K", "H", "device", "ms"]
FACTS = {
    "Device": "device", "Dev_Mem": "memory_gb", "Mem_Bw": "bandwidth_gb_s", "Num_Sm": "sms", "Core_Per_SM": "cores_per_sm",
    "Freq": "mhz", "SingleFLOPs": "fp32_gflop_s", "L2Cache": "l2_mb",
}  # fmt: skip
TDP_W = {"Tesla P4": 75, "Tesla P100-PCIE-16GB": 250, "Tesla T4": 70, "Tesla V100-PCIE-32GB": 250}
TDP_W |= {"NVIDIA A100-PCIE-40GB": 250, "NVIDIA A100 80GB PCIe": 300}
NAMES = {"OPName": "op", "Device": "device", "Latency": "ms", "N": "K", "K": "N"}
OF_CONV = {"Input_Channel": "M", "Output_Channel": "N", "Kernel_Szie": "K", "Input_Size": "H"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("folder", type=Path)
    refuse_in_one_line(parser)
    args = parser.parse_args()
    files = [path for op in OPS for path in sorted((args.checkout / DATA / "collect" / op).glob("*/*.csv"))]
    if not files:
        raise UserError(f"{args.checkout}: has no {DATA}/collect")
    tables = [pd.read_csv(path) for path in files]
    rows = pd.concat([part.rename(columns=NAMES | (OF_CONV if "Stride" in part else {})) for part in tables])[COLUMNS]
    cards = pd.DataFrame(json.loads(path.read_text()) for path in sorted((args.checkout / CARDS).glob("*.json")))
    devices = cards[list(FACTS)].rename(columns=FACTS).loc[lambda frame: frame["device"].isin(rows["device"])]
    args.folder.mkdir(parents=True, exist_ok=True)
    rows.astype(dict.fromkeys("BMNKH", "Int64")).to_csv(args.folder / "kernels.csv", index=False)
    devices.assign(tdp_w=devices["device"].map(TDP_W)).to_csv(args.folder / "devices.csv", index=False)
    print(f"{len(rows):,} operations on {len(devices)} cards: {args.folder}")


if __name__ == "__main__":
    exit_on_user_error(main)
