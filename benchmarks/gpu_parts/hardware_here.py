"""Part 7: `batchscope hardware`, and products of 7000×3000 and 70×30 on both devices, with the sizes between them."""

import subprocess
import sys
from functools import partial

import torch

from batchscope.hardware.microbenchmarks import Microbenchmark, Run

from . import ROOT, Result, Setting

SIZES = [(70 * 2**k, 30 * 2**k) for k in range(6)] + [(7000, 3000)]  # of A; 70×30 to 2240×960, and the large one
REPETITIONS = 100


def hardware(setting: Setting) -> Result:
    """The command's own text; a GPU shows its speed on the large matrix, and not on the small one."""
    line = [sys.executable, "-m", "batchscope.hardware"]
    text = subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    kinds, data = list(dict.fromkeys(["cpu", setting.device])), []
    lines = [f"| A | {' | '.join(kinds)} | fastest |", "| --- " * (len(kinds) + 2) + "|"]
    for rows, columns in SIZES[:2] if setting.small else SIZES:
        seconds = {kind: product_seconds(torch.device(kind), rows, columns) for kind in kinds}
        data.append({"rows": rows, "columns": columns, "seconds": seconds})
        cells = " | ".join(f"{1e3 * value:.3g} ms" for value in seconds.values())
        lines.append(f"| {rows}×{columns} | {cells} | {min(seconds, key=seconds.__getitem__)} |")
    title = f"{REPETITIONS} products A @ A.T in float32, summed up"
    return Result("\n".join(["```text", text, "```", "", title, "", *lines]), {"products": data})


def product_seconds(device: torch.device, rows: int, columns: int) -> float:
    """Seconds of 100 times `(A @ A.T).sum()`, `A: (rows, columns)`."""
    product = Microbenchmark(1.0 / REPETITIONS, partial(_product, device, rows, columns))
    with torch.inference_mode():
        product.time_for(0.2)
    return 1 / product.rate


def _product(device: torch.device, rows: int, columns: int) -> Run:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)
    return lambda: (matrix @ matrix.T).sum()
