"""Which card of a set is the fastest, by `batchscope choose` and by the measurements.

    python benchmarks/device_choice/orders.py --fit ../shared/data/gpu_kernels

A question is a set of two or three cards of the folder, and work: an operation that all cards of the folder have measured, or a
step of 3 to 30 such operations, each done up to three times. No card of a question is in the fit that answers it. Columns, in percent:

    answers     the number of answers
    first       of all: the named card is sure (`H100 first`); the other answers are best guesses
    false       of the sure answers: another card is the first by the measurements
    right       of all: the named card is the first
    longer      by how much the named card takes longer than the first one, on average
    holds       of the 95 % intervals of the ratios to the named card: how many hold the measured ratio
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from main import Fit, Measured, read

from batchscope.choice.device_choice import may_be_first
from batchscope.choice.interval import Interval, time_ratio
from batchscope.choice.kernels import predict
from batchscope.errors import exit_on_user_error, refuse_in_one_line

QUESTIONS = 400  # of each kind of work, for each set of cards
OPERATIONS, TIMES = (3, 30), (1, 3)  # of a step: least and most
COLUMNS = ["answers", "first", "false", "right", "longer", "holds"]


def common(measured: Measured) -> tuple[list, pd.DataFrame]:
    """The operations that every card has measured, and their seconds: a row for each operation, a column for each card."""
    rows = measured.rows.drop_duplicates(["shape", "device"])
    seconds = rows.pivot(index="shape", columns="device", values="seconds").dropna()
    return list(rows.drop_duplicates("shape").set_index("shape")["work"].loc[seconds.index]), seconds


def questions(operations: int) -> dict[str, np.ndarray]:
    """By kind of work, how often each operation is done: a row for each question."""
    random = np.random.default_rng(0)
    single = np.eye(operations)[random.choice(operations, QUESTIONS)]
    steps = np.zeros((QUESTIONS, operations))
    for step in steps:
        picked = random.choice(operations, random.integers(OPERATIONS[0], OPERATIONS[1] + 1), replace=False)
        step[picked] = random.integers(TIMES[0], TIMES[1] + 1, len(picked))
    return {"operation": single, "step": steps}


def judged(predicted: Sequence[Interval], measured: Sequence[float]) -> dict[str, float]:
    """An answer, judged by the measurements."""
    named = min(range(len(predicted)), key=lambda number: predicted[number].middle)
    rivals = [number for number in range(len(predicted)) if number != named]
    ratios = [time_ratio(predicted[rival], predicted[named]) for rival in rivals]
    true = [measured[rival] / measured[named] for rival in rivals]
    held = [ratio.low <= value <= ratio.high for ratio, value in zip(ratios, true, strict=True)]
    is_sure, is_right = not may_be_first(predicted[named], [predicted[rival] for rival in rivals]), min(true) >= 1
    score = {"first": is_sure, "right": is_right, "longer": measured[named] / min(measured) - 1, "holds": np.mean(held)}
    return score | {"false": float(not is_right) if is_sure else np.nan}


def answers(measured: Measured) -> Iterator[dict]:
    """Every answer, with its kind of work and its cards."""
    fit, (works, seconds) = Fit(measured), common(measured)
    asked = questions(len(works))
    for cards in (cards for count in (2, 3) for cards in combinations(measured.devices, count)):
        coefficients = fit.coefficients([name for name in measured.devices if name not in cards])
        ends = {card: predict(works, measured.cards[card], coefficients) for card in cards}
        for kind, times in asked.items():
            totals = [(times @ ends[card].T, times @ seconds[card].to_numpy()) for card in cards]
            for number in range(len(times)):
                predicted = [Interval(*total[number]) for total, _ in totals]
                yield {"work": kind, "cards": " + ".join(cards)} | judged(
                    predicted, [true[number] for _, true in totals]
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, required=True, metavar="DIR", help="folder with measurements of five cards")
    refuse_in_one_line(parser)
    cases = pd.DataFrame(answers(read(parser.parse_args().fit))).assign(answers=1)
    aggregations = {name: "sum" if name == "answers" else "mean" for name in COLUMNS}
    for by in (["work"], ["work", "cards"]):
        table = cases.groupby(by).agg(aggregations)
        share = [name for name in COLUMNS if name != "answers"]
        print(f"{table.assign(**(100 * table[share].astype(float)).round(1)).to_string(na_rep='')}\n")


if __name__ == "__main__":
    exit_on_user_error(main)
