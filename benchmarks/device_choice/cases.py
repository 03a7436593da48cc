"""Measured operations with their predictions by coefficients that have not seen the device."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from batchscope.choice.device import Device
from batchscope.choice.kernels import GROUPS, PREDICTED, Coefficients, predict, roof_seconds
from batchscope.choice.seconds import Interval
from batchscope.choice.work import Work
from device_choice.fit import Fit, tables
from device_choice.measurements import Measurements

Shape = tuple[str, tuple[int, ...]]
Row = tuple[Work, Device, float]


@dataclass(frozen=True)
class Case:
    """One measured operation on a device, and its prediction by coefficients that have not seen the device."""

    work: Work
    device: Device
    seconds: float
    predicted: Interval
    how: str
    roof: float
    from_others: Mapping[str, float]  # by device: its measurement of the same shape times the ratio of the roofs
    by_model: Mapping[str, float] = field(default_factory=dict)  # the same with the ratio of the predictions

    @property
    def shape(self) -> Shape:
        return self.work.name, self.work.dims


@dataclass(frozen=True)
class Evaluation:
    cases: list[Case]
    bounds: list[Case]
    coefficients: dict[str, Coefficients]  # by device: those that predicted it
    known: dict[Shape, dict[str, float]]  # measured on devices that were fitted, where others are tested


def evaluate(fitted: Measurements, tested: Measurements | None) -> Evaluation:
    """Predict every measurement of `tested`; without it, each device of `fitted` from its others."""
    fit, names = Fit(fitted), fitted.measured_devices()
    target = tested or fitted
    by_shape: dict[Shape, list[Row]] = defaultdict(list)
    for row in fitted.rows:
        by_shape[row[0].name, row[0].dims].append(row)
    coefficients, cases = {}, []
    for name in target.measured_devices():
        of = fit.coefficients(names if tested else [other for other in names if other != name])
        coefficients[name] = of
        middles = _middles(fitted, of)
        cases += [_case(row, by_shape, middles, of) for row in target.rows if row[1].name == name]
    known = {shape: {row[1].name: row[2] for row in rows} for shape, rows in by_shape.items()} if tested else {}
    predicted = [case for case in cases if case.how == PREDICTED]
    return Evaluation(predicted, [case for case in cases if case.how != PREDICTED], coefficients, known)


def _middles(measurements: Measurements, of: Coefficients) -> dict[tuple[Shape, str], float]:
    """By operation and device, the predictions of everything that was measured."""
    found: dict[tuple[Shape, str], float] = {}
    for family, table in tables(measurements.rows).items():
        rows = [row for row in measurements.rows if GROUPS[row[0].kind] == family]
        seconds = np.exp(table.predicted(getattr(of, family)))
        found |= {
            ((work.name, work.dims), device.name): float(each)
            for (work, device, _), each in zip(rows, seconds, strict=True)
        }
    return found


def _case(
    row: Row, by_shape: Mapping[Shape, list[Row]], middles: Mapping[tuple[Shape, str], float], of: Coefficients
) -> Case:
    work, device, seconds = row
    predicted, how = predict(work, device, of=of)
    roof, ratios, modelled = roof_seconds(work, device), {}, {}
    for _, other, there in by_shape.get((work.name, work.dims), ()):
        if other.name != device.name:
            ratios[other.name] = there * roof / roof_seconds(work, other)
            if how == PREDICTED:
                modelled[other.name] = there * predicted.middle / middles[(work.name, work.dims), other.name]
    return Case(work, device, seconds, predicted, how, roof, ratios, modelled)
