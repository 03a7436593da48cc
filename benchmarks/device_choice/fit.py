"""Fit the coefficients of `batchscope.choice.roofs` to measurements: maximum a posteriori, with a physical prior for each.

Few devices are measured, so that a coefficient that differs between cards is known mostly from its prior:

- `l2_exponent`, `lanes_exponent`: how the energy of a FLOP falls with newer cards. From the rated watts per peak FLOP/s of 19
  datasheets of `src/hardware/devices.yaml`, without the five cards of the shared file. A regression on the L2 of a
  multiprocessor gives -0.23; one on that and on its lanes gives -0.06 and -1.22. The prior is the mean of the two.
- `joules_per_flop`, `joules_per_byte`: what a card of 2017 is rated at; the energy of a byte of HBM or GDDR.
- `least_seconds`: the shortest kernels of any card take about 3 µs.
- The others: what large products and copies usually reach, with wide priors.

Which coefficients there are was decided with all devices of the shared file in sight. `benchmarks/results/choose.md` says
what else was tried.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from measurements import Measurements

from batchscope.choice.kernels import GROUPS, Coefficients, facts
from batchscope.choice.roofs import Array, Cards, card, memory_seconds, product_seconds
from batchscope.choice.work import Work
from batchscope.hardware.datasheet import Datasheet

# Median and standard deviation (of the logarithm, or of an exponent itself).
_EXPONENTS = {"l2_exponent", "lanes_exponent"}
_PRIORS = {
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
        "norm_passes": (1.0, 0.2),  # reads of a row beside the first
        "softmax_passes": (2.0, 0.2),
    },
}
_ERROR = {"products": 0.15, "memory": 0.1}  # beyond which a residual counts linearly
_ROWS = 300  # of a device and group that are read, evenly spaced
_COUNTED = {"products": 40, "memory": 20}  # at most, as independent ones, of a device and group
_SHARE_COUNTED = 0.09  # of fewer rows
# Before any device was left out: the standard deviation, and for how many devices it counts.
_PRIOR_SPREAD = {"products": (0.2, 2), "memory": (0.12, 2)}
_PRIOR_KERNELS = {"products": 0.12, "memory": 0.06}
_QUANTILE = 0.8, 1.2815515594457  # of absolute residuals, and of a normal distribution


@dataclass(frozen=True)
class Table:
    """Operations of one family as arrays."""

    family: str
    group: Array
    device: Array  # names
    shape: tuple[Array, ...]  # B, M, N, K, or H alone
    bytes: Array
    cards: Cards
    log_seconds: Array

    def __getitem__(self, index: Array) -> "Table":
        shape = tuple(each[index] for each in self.shape)
        arrays = (self.bytes[index], _picked(self.cards, index), self.log_seconds[index])
        return Table(self.family, self.group[index], self.device[index], shape, *arrays)

    def predicted(self, values: Mapping[str, float]) -> Array:
        """The logarithm of seconds."""
        if self.family == "products":
            return np.log(product_seconds(self.shape, self.bytes, self.cards, values))  # type: ignore[arg-type]
        return np.log(memory_seconds(self.group, self.shape[0], self.bytes, self.cards, values))


def tables(rows: Sequence[tuple[Work, Datasheet, float]]) -> dict[str, Table]:
    """The rows by family; a family without rows is left out."""
    found = {}
    for family in ("products", "memory"):
        own = [row for row in rows if GROUPS[row[0].kind] == family]
        if own:
            found[family] = _table(family, own)
    return found


def _table(family: str, rows: Sequence[tuple[Work, Datasheet, float]]) -> Table:
    devices = list({device.names[0]: device for _, device, _ in rows}.values())
    each = [card(device) for device in devices]
    cards = Cards(*(np.concatenate([getattr(one, field.name) for one in each]) for field in fields(Cards)))
    index = {device.names[0]: position for position, device in enumerate(devices)}
    if family == "products":
        dims = np.array([(1, *work.dims) if work.kind == "linear" else work.dims for work, _, _ in rows], float)
    else:
        dims = np.array([work.dims[-1:] for work, _, _ in rows], float)
    return Table(
        family,
        np.array([work.kind for work, _, _ in rows]),
        np.array([device.names[0] for _, device, _ in rows]),
        tuple(dims.T),
        np.array([work.bytes for work, _, _ in rows]),
        _picked(cards, np.array([index[device.names[0]] for _, device, _ in rows])),
        np.log([seconds for _, _, seconds in rows]),
    )


def _picked(cards: Cards, index: Array) -> Cards:
    return Cards(*(getattr(cards, field.name)[index] for field in fields(Cards)))


class Fit:
    """The coefficients for any part of the devices, each fitted once."""

    def __init__(self, measurements: Measurements):
        self.devices = {name: measurements.devices[name] for name in measurements.measured_devices()}
        self.source = ""
        self.tables = {family: _thinned(table) for family, table in tables(measurements.rows).items()}
        self._fitted: dict[frozenset[str], dict[str, dict[str, float]]] = {}

    def values(self, devices: Iterable[str]) -> dict[str, dict[str, float]]:
        """By family, the most probable coefficients."""
        key = frozenset(devices)
        if key not in self._fitted:
            self._fitted[key] = {
                family: _fit(table[np.isin(table.device, list(key))])
                if (table := self.tables.get(family)) is not None and np.isin(table.device, list(key)).any()
                else {name: median for name, (median, _) in _PRIORS[family].items()}
                for family in _PRIORS
            }
        return self._fitted[key]

    def coefficients(self, devices: Sequence[str]) -> Coefficients:
        """With the spreads that each of these devices shows when it is left out of the fit."""
        effects: dict[str, list[float]] = {group: [] for group in GROUPS}
        kernels: dict[str, list[float]] = {group: [] for group in GROUPS}
        for name in devices if len(devices) > 1 else ():
            values = self.values(other for other in devices if other != name)
            for family, table in self.tables.items():
                own = table[table.device == name]
                residuals = own.log_seconds - own.predicted(values[family])
                for group in set(own.group):
                    of_group = residuals[own.group == group]
                    effects[group].append(float(np.median(of_group)))
                    kernels[group].append(_spread(of_group))
        values = self.values(devices)
        ranges: dict[str, tuple[float, float]] = {}
        for name in devices:
            for fact, value in facts(self.devices[name]).items():
                low, high = ranges.get(fact, (value, value))
                ranges[fact] = min(low, value), max(high, value)
        return Coefficients(
            **values,
            device_spread={group: _pooled(found, *_PRIOR_SPREAD[GROUPS[group]]) for group, found in effects.items()},
            kernel_spread={
                group: float(np.mean([*found, _PRIOR_KERNELS[GROUPS[group]]])) for group, found in kernels.items()
            },
            range=ranges,
            source=self.source,
        )


def _pooled(values: Sequence[float], prior: float, weight: int) -> float:
    return math.sqrt((sum(value**2 for value in values) + weight * prior**2) / (len(values) + weight))


def _spread(residuals: Array) -> float:
    """A standard deviation that is right at the ends of an 80 % interval."""
    share, normal = _QUANTILE
    return float(np.quantile(np.abs(residuals - np.median(residuals)), share)) / normal


def _thinned(table: Table) -> Table:
    kept = []
    for name in np.unique(table.device):
        for group in np.unique(table.group):
            rows = np.flatnonzero((table.device == name) & (table.group == group))
            kept.append(rows[np.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).round().astype(int)])
    return table[np.concatenate(kept)]


def _fit(table: Table) -> dict[str, float]:
    priors = _PRIORS[table.family]
    center = np.array([value if name in _EXPONENTS else math.log(value) for name, (value, _) in priors.items()])
    width = np.array([deviation for _, deviation in priors.values()])
    weight, error = _weights(table), _ERROR[table.family]

    def residuals(x: Array) -> Array:
        scaled = (table.log_seconds - table.predicted(_named(priors, x))) / error
        robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))  # pseudo-Huber
        return np.concatenate([weight * robust, (x - center) / width])

    return _named(priors, _least_squares(residuals, center))


def _named(priors: Mapping[str, object], x: Array) -> dict[str, float]:
    return {n: float(v if n in _EXPONENTS else math.exp(v)) for n, v in zip(priors, x, strict=True)}


def _weights(table: Table) -> Array:
    """Each device counts as much as another in each group."""
    weight = np.zeros(len(table.bytes))
    for name in np.unique(table.device):
        for group in np.unique(table.group):
            rows = (table.device == name) & (table.group == group)
            count = max(1, rows.sum())
            weight[rows] = math.sqrt(min(_COUNTED[table.family] / count, _SHARE_COUNTED))
    return weight


def _least_squares(residuals: Callable[[Array], Array], start: Array, rounds: int = 40) -> Array:
    """Levenberg and Marquardt's method, with differences for derivatives."""
    x, damping = start.copy(), 1e-2
    now = residuals(x)
    for _ in range(rounds):
        jacobian = np.stack([(residuals(x + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(x))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        before = now @ now
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            there = residuals(x + move)
            if there @ there < before:
                x, now, damping = x + move, there, max(damping / 5, 1e-9)
                break
            damping *= 5
        if before - now @ now < 1e-6 * before:
            break
    return x
