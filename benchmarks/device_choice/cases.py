"""Measured operations with their predictions by coefficients that have not seen the card."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchscope.choice.interval import Interval
from batchscope.choice.kernels import Coefficients, predict, roof_seconds
from batchscope.choice.work import Work
from batchscope.hardware.datasheet import Datasheet
from device_choice.fit import Fit
from device_choice.measurements import Measurements

Shape = tuple[str, tuple[int, ...]]
Row = tuple[Work, Datasheet, float]


@dataclass(frozen=True)
class Case:
    """One measured operation on a card, and its prediction by coefficients that have not seen the card."""

    work: Work
    card: str
    seconds: float
    predicted: Interval
    roof: float
    from_others: Mapping[str, float]  # by card: its measurement of the same shape times the ratio of the roofs

    @property
    def shape(self) -> Shape:
        return self.work.name, self.work.dims


@dataclass(frozen=True)
class Evaluation:
    cases: list[Case]
    known: dict[Shape, dict[str, float]]  # measured on cards that were fitted, where others are tested


def evaluate(fitted: Measurements, tested: Measurements | None) -> Evaluation:
    """Predict every measurement of `tested`; without it, each card of `fitted` from its others."""
    fit, names = Fit(fitted), fitted.measured_devices()
    by_shape: dict[Shape, list[Row]] = defaultdict(list)
    for row in fitted.rows:
        by_shape[row[0].name, row[0].dims].append(row)
    cases: list[Case] = []
    for name in (tested or fitted).measured_devices():
        of = fit.coefficients(names if tested else [other for other in names if other != name])
        rows = [row for row in (tested or fitted).rows if row[1].names[0] == name]
        cases += _cases(rows, by_shape, of)
    known = {shape: {row[1].names[0]: row[2] for row in rows} for shape, rows in by_shape.items()} if tested else {}
    return Evaluation(cases, known)


def _cases(rows: Sequence[Row], by_shape: Mapping[Shape, list[Row]], of: Coefficients) -> list[Case]:
    """The measurements of one card."""
    card = rows[0][1]
    predicted = predict([work for work, _, _ in rows], card, of).T.tolist()
    found = []
    for (work, _, seconds), ends in zip(rows, predicted, strict=True):
        roof, ratios = roof_seconds(work, card), {}
        for _, other, there in by_shape.get((work.name, work.dims), ()):
            if other.names[0] != card.names[0]:
                ratios[other.names[0]] = there * roof / roof_seconds(work, other)
        found.append(Case(work, card.names[0], seconds, Interval(*ends), roof, ratios))
    return found
