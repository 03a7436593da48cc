"""Measure single operations on this machine's GPU, in the form that `main.py` reads: a folder to test predictions with.

    python benchmarks/device_choice/measure.py outputs/kernels
    python benchmarks/device_choice/main.py --fit FOLDER --test outputs/kernels

float32; each is the best of many short blocks, so that the host's launch does not count where the kernel is longer.
`--smallest` measures small ones on any device.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from batchscope.errors import UserError, exit_on_user_error
from batchscope.hardware.datasheet import datasheet

LINEAR = [(1024, 1024, 1024), (4096, 4096, 1024), (8192, 4096, 4096), (2048, 768, 3072), (16384, 1024, 1024)]  # M, N, K
BATCHED = [(64, 512, 512, 64), (96, 1024, 1024, 128), (16, 2048, 2048, 512)]  # B, M, N, K
ROWS, WIDTHS = (4096, 16384, 65536), (768, 1024, 4096)


def device_row(device: str) -> dict[str, Any]:
    """This card's line of devices.csv; on a CPU, the line of an invented card."""
    if device == "cpu":
        row = {"device": "smallest", "memory_gb": 16, "bandwidth_gb_s": 20, "sms": 2, "cores_per_sm": 64, "mhz": 1000}
        return row | {"fp32_gflop_s": 200, "l2_mb": 1, "tdp_w": 50}
    properties, sheet = torch.cuda.get_device_properties(0), datasheet(torch.cuda.get_device_name())
    if sheet is None:
        raise UserError(f"no datasheet of {torch.cuda.get_device_name()} in devices.yaml")
    row = {"device": sheet.names[0], "memory_gb": sheet.memory_gib, "bandwidth_gb_s": sheet.memory_bytes_per_sec / 1e9}
    row |= {"sms": properties.multi_processor_count, "cores_per_sm": sheet.cores_per_sm, "mhz": sheet.clock_mhz}
    return row | {"fp32_gflop_s": sheet.flops_per_sec["fp32"] / 1e9, "l2_mb": sheet.l2_mib, "tdp_w": sheet.tdp_w}


def kernel_rows(device: str, shrink: int, seconds: float) -> list[dict[str, Any]]:
    """Rows of kernels.csv, every size divided by `shrink`."""
    name, rows = device_row(device)["device"], []

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device) + 0.5

    def add(op: str, run: Callable[[], Any], **dims: int) -> None:
        ms = 1e3 * min(Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=seconds).times)
        rows.append(dict.fromkeys("BMNKH", "") | {"op": op, **dims, "device": name, "ms": ms})

    for m, n, k in ([max(8, size // shrink) for size in dims] for dims in LINEAR):
        a, w, bias = positive(m, k), positive(n, k), positive(n)
        add("linear", lambda a=a, w=w, bias=bias: F.linear(a, w, bias), M=m, N=n, K=k)
    for b, m, n, k in ([max(8, size // shrink) for size in dims] for dims in BATCHED):
        a, w = positive(b, m, k), positive(b, k, n)
        add("bmm", lambda a=a, w=w: torch.bmm(a, w), B=b, M=m, N=n, K=k)
    for b, h in ((max(8, b // shrink), max(8, h // shrink)) for b in ROWS for h in WIDTHS):
        x, y, weight = positive(b, h), positive(b, h), positive(h)
        add("add", lambda x=x, y=y: x + y, B=b, H=h)
        add("tanh", lambda x=x: x.tanh(), B=b, H=h)
        add("relu", lambda x=x: x.relu(), B=b, H=h)
        add("softmax", lambda x=x: x.softmax(-1), B=b, H=h)
        add("ln", lambda x=x, w=weight: F.layer_norm(x, w.shape, w, w), B=b, H=h)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--smallest", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.smallest:
        raise UserError("no CUDA device here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.folder.mkdir(parents=True, exist_ok=True)
    kernels = kernel_rows(device, *((64, 0.005) if args.smallest else (1, 0.1)))
    for name, rows in (("devices.csv", [device_row(device)]), ("kernels.csv", kernels)):
        with (args.folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"{len(kernels)} operations: {args.folder}")


if __name__ == "__main__":
    exit_on_user_error(main)
