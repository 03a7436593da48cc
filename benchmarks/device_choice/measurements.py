"""Read a folder of measured operations: `kernels.csv` and `devices.csv`. A damaged row ends the program in one line.

devices.csv: `device`, `bandwidth_gb_s`, `fp32_gflop_s`, `sms`, `cores_per_sm`, `l2_mb` and `tdp_w`. kernels.csv: `op`, `device`, `ms`, and the dimensions that the operation has. Where
it has a `dtype` or `precision`, rows of another one than float32 are left out: nothing says how such a time compares.
"""

import csv
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchscope.choice.work import Work
from batchscope.errors import UserError
from batchscope.hardware.datasheet import Datasheet

Row = dict[str, str]
_FACTS = ("bandwidth_gb_s", "fp32_gflop_s", "sms", "cores_per_sm", "l2_mb", "tdp_w")  # of a device
_PRODUCTS = {"linear": ("M", "N", "K"), "bmm": ("B", "M", "N", "K")}
_ROWS = {"softmax": "softmax", "log_softmax": "softmax", "ln": "layer_norm", "layer_norm": "layer_norm"}
_ON_TWO = {
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "max",
    "min",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "gt",
    "le",
    "ge",
    "atan2",
    "fmod",
    "remainder",
}
_ON_ONE = {
    "relu",
    "tanh",
    "gelu",
    "sigmoid",
    "silu",
    "elu",
    "selu",
    "leaky_relu",
    "softplus",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "neg",
    "abs",
    "sin",
    "cos",
    "erf",
    "square",
    "reciprocal",
    "clamp",
    "copy",
    "dropout",
}
_ON_ONE |= {f"{name}u" for name in _ON_TWO}
_LARGEST = 2**40
_PRECISION = ("dtype", "precision")  # columns
_FLOAT32 = ("", "fp32", "float32", "float", "f32", "32-true", "torch.float32")


@dataclass(frozen=True)
class Measurements:
    """Operations with their devices and measured seconds, and all devices of the folder by name."""

    folder: Path
    devices: dict[str, Datasheet]
    rows: list[tuple[Work, Datasheet, float]]

    def measured_devices(self) -> list[str]:
        seen = {device.names[0] for _, device, _ in self.rows}
        return [name for name in self.devices if name in seen]


def read(folder: Path) -> Measurements:
    """
    Raises:
        UserError: for a folder without the files, a damaged row (with its line), and a folder without measurements.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; it takes one with kernels.csv and devices.csv")
    devices: dict[str, Datasheet] = {}
    for where, row in _table(folder / "devices.csv", ("device", *_FACTS)):
        device = _device(where, row)
        if device.names[0] in devices:
            raise UserError(f"{where}: device {device.names[0]} is there twice")
        devices[device.names[0]] = device
    rows, unknown = [], Counter()
    for where, row in _table(folder / "kernels.csv", ("op", "device", "ms")):
        work = _work(where, row)
        if row["device"] not in devices:
            raise UserError(f"{where}: device '{row['device']}' is not in {folder / 'devices.csv'}")
        seconds = _number(where, row, "ms") / 1e3
        other = next((row[name] for name in _PRECISION if row.get(name, "").lower() not in _FLOAT32), "")
        if work is None or other:
            unknown[f"{row['op']} in {other}" if other else row["op"]] += 1
        else:
            rows.append((work, devices[row["device"]], seconds))
    if unknown:
        names = ", ".join(f"{name} ({count} rows)" for name, count in sorted(unknown.items()))
        print(
            f"warning: {folder / 'kernels.csv'}: operations that are not known are left out: {names}", file=sys.stderr
        )
    if not rows:
        raise UserError(f"{folder / 'kernels.csv'}: has no measurement of a known operation")
    return Measurements(folder, devices, rows)


def _table(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    """The rows of a CSV file, each with its file and line for errors."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            absent = [name for name in needed if name not in (reader.fieldnames or ())]
            if absent:
                raise UserError(f"{path}:1: has no column {' and no column '.join(absent)}")
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row:
                    raise UserError(f"{where}: has more values than the header has columns")
                if any(row[name] is None for name in needed):
                    raise UserError(f"{where}: has fewer values than the header has columns")
                yield where, {name: (value or "").strip() for name, value in row.items()}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: is not CSV: {error}") from None


def _number(where: str, row: Row, column: str) -> float:
    try:
        value = float(row.get(column, ""))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{where}: {column} is '{row.get(column, '')}'; it takes a positive number")
    return value


def _device(where: str, row: Row) -> Datasheet:
    facts = {column: _number(where, row, column) for column in _FACTS}
    if row.get("kind", "cuda") not in ("cuda", ""):
        raise UserError(f"{where}: kind is '{row['kind']}'; only cards of NVIDIA's (cuda) are predicted")
    if not row["device"]:
        raise UserError(f"{where}: device is empty; it takes a name")
    return Datasheet(
        names=(row["device"],),
        short=(row["device"],),
        memory_gib=0.0,  # no time depends on it
        memory_bytes_per_sec=facts["bandwidth_gb_s"] * 1e9,
        flops_per_sec={"fp32": facts["fp32_gflop_s"] * 1e9},
        source={},
        sms=round(facts["sms"]),
        cores_per_sm=round(facts["cores_per_sm"]),
        l2_mib=facts["l2_mb"],
        tdp_w=facts["tdp_w"],
    )


def _work(where: str, row: Row) -> Work | None:
    """The operation of a row in float32; None for an unknown one."""
    op = row["op"]
    if not op:
        raise UserError(f"{where}: op is empty; it takes the name of an operation")

    def dims(*columns: str) -> tuple[int, ...]:
        values = [_number(where, row, column) for column in columns]
        for column, value in zip(columns, values, strict=True):
            if value != round(value) or value > _LARGEST:
                raise UserError(
                    f"{where}: {column} is '{row[column]}'; it takes a whole number of at most {_LARGEST:,}"
                )
        return tuple(round(value) for value in values)

    if op in _PRODUCTS:
        shape = dims(*_PRODUCTS[op])
        m, n, k = shape[-3:]
        batch = shape[0] if op == "bmm" else 1
        bias = n if op == "linear" else 0
        return Work(op, op, shape, 2.0 * batch * m * n * k, 4.0 * (batch * (m * k + k * n + m * n) + bias))
    if op in _ROWS or op in _ON_ONE or op in _ON_TWO:
        b, h = dims("B", "H")
        return Work(_ROWS.get(op, "elementwise"), op, (b, h), float(b * h), 4.0 * b * h * (3 if op in _ON_TWO else 2))
    return None
