"""Fit the kernel model of `batchscope.choice` to measured operations, and predict GPUs that were not fitted.

    python benchmarks/device_choice/main.py --fit ../shared/data/gpu_kernels                 # leave one GPU out, each in turn
    python benchmarks/device_choice/main.py --fit ../shared/data/gpu_kernels --test FOLDER   # GPUs of another folder
    python benchmarks/device_choice/main.py --fit ../shared/data/gpu_kernels --write         # also writes src/choice/kernels.json

A folder has `kernels.csv` (op, B, M, N, K, H, device, ms; float32) and `devices.csv` (device, memory_gb, bandwidth_gb_s, sms,
cores_per_sm, mhz, fp32_gflop_s, l2_mb, tdp_w). `measure.py` writes such a folder on a machine with a GPU. No device's name
enters a prediction.

The fit is maximum a posteriori, with a physical prior for each coefficient. Few devices are measured, so a coefficient that
differs between cards is known mostly from its prior:

- `l2_exponent`, `lanes_exponent`: how the energy of a FLOP falls with newer cards. From the rated watts per peak FLOP/s of 19
  datasheets of `src/hardware/devices.yaml`, without the five cards of the shared file. A regression on the L2 of a
  multiprocessor gives -0.23; one on that and on its lanes gives -0.06 and -1.22. The prior is the mean of the two.
- `joules_per_flop`, `joules_per_byte`: what a card of 2017 is rated at; the energy of a byte of HBM or GDDR.
- `least_seconds`: the shortest kernels of any card take about 3 µs.
- The others: what large products and copies usually reach, with wide priors.

The intervals come from the fitted devices alone: each is left out of the fit in turn. Columns of the tables, in percent:

    error       median of |predicted / measured - 1|
    holds       of the 90 % intervals: how many hold the measurement
    width       median of (high - low) / middle
    roofline    the error of max(FLOPs / peak, bytes / bandwidth)
    roof ratio  the error of another fitted device's measurement of the same shape, times the ratio of the rooflines
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small, and the sums are the same on every machine

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from batchscope.choice.kernels import FILE, GROUPS, Coefficients, facts, predict, roof_seconds
from batchscope.choice.roofs import Array, memory_seconds, product_seconds
from batchscope.choice.work import Work
from batchscope.errors import UserError, exit_on_user_error, refuse_in_one_line
from batchscope.files import write_text
from batchscope.hardware.datasheet import Datasheet

SOURCE = "NeuSight (Lee, Phanishayee, Mahajan, ASPLOS 2025), repository sitar-lab/NeuSight, commit 6945927, MIT licence"

# --- measurements

# Columns by op; all other ops have B and H. A convolution has N kernels of K × K for B images of M channels and H × H pixels.
DIMS = {"linear": ["M", "N", "K"], "bmm": ["B", "M", "N", "K"], "conv": ["B", "M", "N", "K", "H"]}
KINDS = {"linear": "linear", "bmm": "bmm", "softmax": "softmax", "ln": "layer_norm"}
FACTS = ["memory_gb", "bandwidth_gb_s", "sms", "cores_per_sm", "mhz", "fp32_gflop_s", "l2_mb", "tdp_w"]
# By op, the tensors that are read and written: `add` adds two tensors, `addu` a number to a tensor.
TENSORS = dict.fromkeys(("add", "sub", "mul", "div", "pow"), 3)
TENSORS |= {f"{name}u": 2 for name in TENSORS} | dict.fromkeys(("relu", "tanh", "gelu", "softmax", "ln"), 2)


@dataclass(frozen=True)
class Measured:
    """The operations of a folder (columns: work, shape, kind, family, device, seconds), and its devices by name."""

    rows: pd.DataFrame
    cards: dict[str, Datasheet]

    @property
    def devices(self) -> list[str]:
        return [name for name in self.cards if name in set(self.rows["device"])]


def read(folder: Path) -> Measured:
    """Read the measurements of a folder.

    Raises:
        UserError: for a missing file, a missing column, and a value that is no positive number.
    """
    devices = _table(folder / "devices.csv", ["device"], FACTS)
    kernels = _table(folder / "kernels.csv", ["op", "device"], ["ms"])
    cards = {row["device"]: _datasheet(row) for row in devices.to_dict("records")}
    for column, allowed in (("device", cards), ("op", {*DIMS, *TENSORS})):
        if unknown := set(kernels[column]) - set(allowed):
            raise UserError(f"{folder / 'kernels.csv'}: {column} '{min(unknown)}' is not known")
    works = [_work(folder, row) for row in kernels.to_dict("records")]
    rows = {
        "work": works,
        "shape": [f"{work.name} {work.dims}" for work in works],
        "kind": [work.kind for work in works],
        "family": [GROUPS.get(work.kind, "products") for work in works],
        "device": kernels["device"],
        "seconds": kernels["ms"] / 1e3,
    }
    return Measured(pd.DataFrame(rows), cards)


def _table(path: Path, names: list[str], numbers: list[str]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path, encoding="utf-8-sig", dtype=dict.fromkeys(names, str))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if absent := [name for name in (*names, *numbers) if name not in table]:
        raise UserError(f"{path}: has no column {absent[0]}")
    for name in numbers:
        values = pd.to_numeric(table[name], errors="coerce")
        if not (valid := (values > 0) & np.isfinite(values)).all():
            raise UserError(f"{path}:{valid.argmin() + 2}: {name} is no positive number")
    if table.empty or table[names].isna().any().any():
        raise UserError(f"{path}: is empty, or a row of it has no {' or '.join(names)}")
    return table


def _datasheet(row: Mapping[str, Any]) -> Datasheet:
    names = (row["device"],)
    peak, bandwidth = {"fp32": row["fp32_gflop_s"] * 1e9}, row["bandwidth_gb_s"] * 1e9
    chip = {"sms": row["sms"], "cores_per_sm": row["cores_per_sm"], "tdp_w": row["tdp_w"]}
    return Datasheet(
        names, names, row["memory_gb"], bandwidth, peak, {}, clock_mhz=row["mhz"], l2_mib=row["l2_mb"], **chip
    )


def _work(folder: Path, row: Mapping[str, float]) -> Work:
    """The operation of a row, in float32."""
    op = str(row["op"])
    try:
        dims = tuple(int(row[name]) for name in DIMS.get(op, ["B", "H"]))
    except (KeyError, ValueError):
        raise UserError(f"{folder / 'kernels.csv'}: a row of {op} lacks a dimension") from None
    if op == "conv":  # with a stride of 1, and the same number of pixels in the result
        b, m, n, k, h = dims
        moved = 4.0 * (b * (m + n) * h**2 + m * n * k**2)
        return Work("convolution", op, (b, n, h, h, m, k, k), 2.0 * b * m * n * (k * h) ** 2, moved)
    if op in DIMS:
        b, m, n, k = (1, *dims)[-4:]
        bias = n if op == "linear" else 0
        return Work(op, op, dims, 2.0 * b * m * n * k, 4.0 * (b * (m * k + k * n + m * n) + bias))
    count = float(math.prod(dims))
    return Work(KINDS.get(op, "elementwise"), op, dims, count, 4.0 * count * TENSORS[op])


# --- the fit

# Median and standard deviation (of the logarithm, or of an exponent itself).
EXPONENTS = {"l2_exponent", "lanes_exponent"}
PRIORS = {
    "products": {
        "compute_share": (0.92, 0.05),
        "memory_share": (0.8, 0.3),
        "joules_per_flop": (16e-12, 0.3),
        "joules_per_byte": (60e-12, 0.5),
        "l2_exponent": (-0.15, 0.1),
        "lanes_exponent": (-0.6, 0.3),
        "k_overhead": (24.0, 1.0),
        "overlap_norm": (3.0, 0.5),
        "power_norm": (8.0, 0.05),
        "small_tile_penalty": (1.0, 0.3),
        "whole_waves": (0.5, 0.5),
        "least_seconds": (3e-6, 0.05),
    },
    "memory": {
        "memory_share": (0.85, 0.2),
        "least_seconds": (3e-6, 0.05),
        "norm_rows": (16.0, 1.0),  # rows that a multiprocessor reads at the same time
        "softmax_rows": (2.0, 1.0),
        "sharpness": (2.0, 0.5),
        "norm_passes": (1.0, 0.2),  # reads of a row after the first
        "softmax_passes": (2.0, 0.2),
    },
}
ERROR = {"products": 0.15, "memory": 0.1}  # larger residuals count linearly
ROWS = 300  # used rows of a device and kind, evenly spaced
COUNTED = {"products": 40, "memory": 20}  # the weight of a device and kind is at most that of so many independent rows
SHARE_COUNTED = 0.09  # of fewer rows
# The prior of the spread: a standard deviation, and the number of devices that it counts for.
PRIOR_SPREAD = {"products": (0.2, 2), "memory": (0.12, 2)}
PRIOR_KERNELS = {"products": 0.12, "memory": 0.06}
QUANTILE = 0.8, 1.2815515594457  # the level, and the quantile of a normal distribution's absolute value
Values = dict[str, float]


class Fit:
    """Fits the coefficients to any subset of the devices of a folder."""

    def __init__(self, measured: Measured):
        parts = measured.rows.groupby(["device", "kind"], sort=False)
        thin = [part.iloc[np.linspace(0, len(part) - 1, min(len(part), ROWS)).round().astype(int)] for _, part in parts]
        self.rows, self.cards = pd.concat(thin, ignore_index=True), measured.cards
        self.values = cache(self._values)  # by the devices that are fitted

    def coefficients(self, devices: Sequence[str], source: str = "") -> Coefficients:
        """The coefficients of `devices`, with spreads from leaving each device out of the fit in turn."""
        effects: dict[str, list[float]] = {kind: [] for kind in GROUPS}
        kernels: dict[str, list[float]] = {kind: [] for kind in GROUPS}
        for name in devices if len(devices) > 1 else ():
            values = self.values(frozenset(devices) - {name})
            for (family, kind), group in self.rows[self.rows["device"] == name].groupby(["family", "kind"]):
                residuals = np.log(group["seconds"]) - log_seconds(group, self.cards)(values[family])
                effects[kind].append(residuals.median())
                share, normal = QUANTILE  # a robust width of the residuals, without the few odd kernels
                kernels[kind].append((residuals - residuals.median()).abs().quantile(share) / normal)
        datasheets = pd.DataFrame([facts(self.cards[name]) for name in devices])
        return Coefficients(
            **self.values(frozenset(devices)),
            device_spread={kind: _pooled(offsets, *PRIOR_SPREAD[GROUPS[kind]]) for kind, offsets in effects.items()},
            kernel_spread={
                kind: float(np.mean([*deviations, PRIOR_KERNELS[GROUPS[kind]]])) for kind, deviations in kernels.items()
            },
            range={fact: (float(column.min()), float(column.max())) for fact, column in datasheets.items()},
            source=source,
        )

    def _values(self, devices: frozenset[str]) -> dict[str, Values]:
        """By family, the most probable coefficients."""
        fitted_rows = self.rows[self.rows["device"].isin(devices)]
        return {family: self._fitted(family, fitted_rows[fitted_rows["family"] == family]) for family in PRIORS}

    def _fitted(self, family: str, rows: pd.DataFrame) -> Values:
        names, priors = list(PRIORS[family]), PRIORS[family].values()
        center = np.array([v if n in EXPONENTS else math.log(v) for n, (v, _) in PRIORS[family].items()])
        width = np.array([deviation for _, deviation in priors])

        def named(x: Array) -> Values:
            return {n: float(v if n in EXPONENTS else math.exp(v)) for n, v in zip(names, x, strict=True)}

        if rows.empty:
            return named(center)
        # In each kind, all devices have the same weight.
        counts = rows.groupby(["device", "kind"])["seconds"].transform("size").to_numpy()
        weight = np.sqrt(np.minimum(COUNTED[family] / counts, SHARE_COUNTED))
        predicted, measured = log_seconds(rows, self.cards), np.log(rows["seconds"].to_numpy())

        def residuals(x: Array) -> Array:
            scaled = (measured - predicted(named(x))) / ERROR[family]
            robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))  # pseudo-Huber
            return np.concatenate([weight * robust, (x - center) / width])

        return named(least_squares(residuals, center, method="lm", diff_step=1e-4).x)


def log_seconds(rows: pd.DataFrame, cards: Mapping[str, Datasheet]) -> Callable[[Values], Array]:
    """A function from the coefficients of the rows' family to the logarithm of the rows' seconds."""
    sheets = [cards[name] for name in rows["device"]]
    numbers = ("memory_bytes_per_sec", "sms", "cores_per_sm", "l2_mib", "tdp_w")
    peaks = np.array([card.flops_per_sec["fp32"] for card in sheets])
    arrays = replace(sheets[0], **{name: np.array([getattr(card, name) for card in sheets], float) for name in numbers})
    moved, kinds = np.array([work.bytes for work in rows["work"]]), rows["kind"].to_numpy()
    if rows["family"].iloc[0] == "memory":
        lengths = np.array([float(work.dims[-1]) for work in rows["work"]])
        return lambda values: np.log(memory_seconds(kinds, lengths, moved, arrays, values))
    b, m, n, k = np.array([(1, *work.dims)[-4:] for work in rows["work"]], float).T
    return lambda values: np.log(product_seconds((b, m, n, k), moved, arrays, peaks, values))


def _pooled(values: Sequence[float], prior: float, weight: int) -> float:
    return math.sqrt((sum(value**2 for value in values) + weight * prior**2) / (len(values) + weight))


def as_json(coefficients: Coefficients) -> str:
    """The text of `kernels.json`, with six digits."""
    rounded = json.loads(json.dumps(asdict(coefficients)), parse_float=lambda text: float(f"{float(text):.6g}"))
    return json.dumps(rounded, indent=2) + "\n"


# --- predictions


def predicted(measured: Measured, coefficients: Callable[[str], Coefficients]) -> pd.DataFrame:
    """The rows with their predictions: columns low, middle, high, roof, in seconds.

    Args:
        measured: the operations to predict.
        coefficients: from a device to the coefficients of a fit without it.
    """
    frames = []
    for name, group in measured.rows.groupby("device", sort=False):
        sheet = measured.cards[name]
        low, middle, high = predict(list(group["work"]), sheet, coefficients(name))
        roof = [roof_seconds(work, sheet) for work in group["work"]]
        frames.append(group.assign(low=low, middle=middle, high=high, roof=roof))
    return pd.concat(frames)


def tables(cases: pd.DataFrame, fitted: Measured) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables by kind of operation and by device, in percent."""
    cases = cases.assign(
        error=(cases["middle"] / cases["seconds"] - 1).abs(),
        holds=cases["seconds"].between(cases["low"], cases["high"]).astype(float),
        width=(cases["high"] - cases["low"]) / cases["middle"],
        roofline=(cases["roof"] / cases["seconds"] - 1).abs(),
    )
    references = fitted.rows[["shape", "device", "seconds"]].assign(
        roof=[roof_seconds(w, fitted.cards[d]) for w, d in zip(fitted.rows["work"], fitted.rows["device"], strict=True)]
    )
    pairs = cases.merge(references, on="shape", suffixes=("", "_there")).query("device != device_there")
    pairs["roof ratio"] = (pairs["seconds_there"] * pairs["roof"] / pairs["roof_there"] / pairs["seconds"] - 1).abs()
    aggregations = {"error": "median", "holds": "mean", "width": "median", "roofline": "median"}
    results = []
    for by in ("kind", "device"):
        copies = [rows.assign(**{by: "all"}) for rows in (cases, pairs)]
        model, naive = (pd.concat([rows, copy]).groupby(by) for rows, copy in zip((cases, pairs), copies, strict=True))
        table = (100 * model.agg(aggregations).join(naive["roof ratio"].median())).round(1)
        table.insert(0, "cases", model.size())
        results.append(table)
    return results[0], results[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, required=True, metavar="DIR", help="folder with the measurements to fit")
    parser.add_argument("--test", type=Path, metavar="DIR", help="folder with measurements to predict")
    parser.add_argument("--write", nargs="?", const=SOURCE, metavar="SOURCE", help=f"write {FILE.name} of the package")
    refuse_in_one_line(parser)
    args = parser.parse_args()
    fitted = read(args.fit)
    names, fit = fitted.devices, Fit(fitted)
    if args.test is None and len(names) < 2:
        raise UserError(f"--fit {args.fit}: has one device; to leave one out takes two, or --test a folder of others")
    tested = read(args.test) if args.test else fitted
    if args.write:
        write_text(FILE, as_json(fit.coefficients(names, args.write)))
    cases = predicted(tested, lambda name: fit.coefficients([device for device in names if device != name]))
    print(f"{len(tested.devices)} devices, each predicted from the fitted ones without it. In percent:")
    for table in tables(cases, fitted):
        print(f"\n{table.to_string()}")


if __name__ == "__main__":
    exit_on_user_error(main)
