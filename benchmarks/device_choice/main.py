"""How well an operation's time on a GPU is predicted that was never measured.

    python benchmarks/device_choice/main.py --fit ../shared/data/gpu_kernels                 # leave one GPU out, each in turn
    python benchmarks/device_choice/main.py --fit ../shared/data/gpu_kernels --test FOLDER   # GPUs of another folder
    python benchmarks/device_choice/main.py --fit ../shared/data/gpu_kernels --write         # also writes src/choice/kernels.json

A folder has `kernels.csv` (op, B, M, N, K, H, device, ms) and `devices.csv` (device, memory_gb, bandwidth_gb_s, sms,
cores_per_sm, mhz, fp32_gflop_s, l2_mb, tdp_w; all but memory_gb and mhz are needed). `measure.py` writes such a
folder on a machine with a GPU. No device's name enters a prediction. The intervals come from the fitted devices alone: each is left out of the fit in turn.

The last line of the output is JSON. Errors, coverage, widths and shares are in percent.

    mode                       "leave one out" or "test"
    fitted, tested             names of devices
    in_both                    tested devices that were also fitted: their errors say nothing of unseen devices
    overall, by_kind, by_operation, by_device, by_kind_and_device, by_operation_and_device: each has
        cases                  measured operations
        error                  median of |predicted / measured - 1|
        coverage               of the 80 % intervals: how many hold the measurement
        width                  median of (high - low) / middle
        bias                   median of predicted / measured - 1, of the logarithms
        roofline_error         the error of max(FLOPs / peak, bytes / bandwidth)
        roof_ratio_error       the error of another fitted device's measurement times the ratio of the rooflines; null without one
        roof_ratio_best_error  the same by each target's best source, which only hindsight knows
    ranking                    pairs of devices whose measurements of one operation differ by over 20 %: pairs, too_close,
                               right_of_called, wrong_of_all; by_kind, by_device_pair. In a test, tested devices are also
                               compared with the measurements of the fitted ones.
    seconds                    what the script took
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small, and the sums are the same on every machine

from evaluate import evaluate, render, results
from fit import Fit
from measurements import Measurements, read

from batchscope.choice.kernels import FILE, Coefficients
from batchscope.errors import UserError, exit_on_user_error, refuse_in_one_line
from batchscope.files import write_text

SOURCE = "NeuSight (Lee, Phanishayee, Mahajan, ASPLOS 2025), repository sitar-lab/NeuSight, commit 6945927, MIT licence"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, required=True, metavar="DIR", help="folder with the measurements to fit")
    parser.add_argument("--test", type=Path, metavar="DIR", help="folder with measurements to predict")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} of the package")
    parser.add_argument("--source", default=SOURCE, help="of the measurements, for --write")
    refuse_in_one_line(parser)
    args = parser.parse_args()
    start = time.perf_counter()
    fitted = read(args.fit)
    tested = read(args.test) if args.test else None
    names = fitted.measured_devices()
    if args.write:
        write_text(FILE, as_json(fit_all(fitted, args.source)))
    if tested is None and len(names) < 2:
        raise UserError(
            f"--fit {args.fit}: has one device; to leave one out takes two, or --test a folder of other devices"
        )
    found: dict = {
        "mode": "test" if tested else "leave one out",
        "fitted": names,
        "tested": (tested or fitted).measured_devices(),
        "in_both": [name for name in tested.measured_devices() if name in names] if tested else [],
    }
    found |= results(evaluate(fitted, tested))
    print(_title(found))
    print(f"\n{render(found)}\n")
    found["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(found))


def fit_all(measurements: Measurements, source: str = SOURCE) -> Coefficients:
    """The coefficients of the package: fitted to every device of the folder."""
    fit = Fit(measurements)
    fit.source = source
    return fit.coefficients(measurements.measured_devices())


def as_json(coefficients: Coefficients) -> str:
    """The text of `kernels.json`, with six digits."""
    rounded = json.loads(json.dumps(asdict(coefficients)), parse_float=lambda text: float(f"{float(text):.6g}"))
    return json.dumps(rounded, indent=2) + "\n"


def _title(found: dict) -> str:
    if found["mode"] == "leave one out":
        return f"Each of {len(found['fitted'])} devices, predicted from the others."
    title = f"{len(found['tested'])} devices, predicted from {len(found['fitted'])} others."
    if found["in_both"]:
        print(
            f"warning: fitted and tested, which says nothing of unseen devices: {', '.join(found['in_both'])}",
            file=sys.stderr,
        )
    return title


if __name__ == "__main__":
    exit_on_user_error(main)
