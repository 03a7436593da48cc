"""How accurate are predictions for the operations of a training step on a card that is not fitted, and when does a card beat the CPU?

    python benchmarks/device_choice/steps.py --fit ../shared/data/gpu_kernels                  # the kernels alone
    python benchmarks/device_choice/steps.py --fit ../shared/data/gpu_kernels --small FOLDER   # with the launch, and the crossing

The operations of a step of SimpleCNN, StackedLSTM (both on images of 28 × 28) and ResNet-18 (on 32 × 32) are recorded at small batch sizes,
and scaled linearly to others. Each is replaced by the measured operation of its kind that is nearest in FLOPs and bytes: a recurrent kernel
by its products; a normalisation, and any kind that the folder lacks, by an elementwise operation; a convolution, if the folder has none, by
a product. Each card is left out of the fit in turn.

A measurement of NeuSight is a call that begins on an idle device, so it includes the host's time until the kernel starts. FOLDER
(neusight.py) has calls that are short enough to show that time on the other cards. Columns:

    cases    operations of a step, on a card
    error    median of |predicted / measured - 1|, in percent
    holds    of the 90 % intervals: how many hold the measurement, in percent
    width    median of (high - low) / middle, in percent
    away     the median factor, in FLOPs or bytes, from the operation of the step to the measured one

An operation is judged if the measured one is within a factor of 4; the others have their own line. The region of a call is the part that takes longest by the datasheet: the launch (15 µs), memory, or arithmetic.

The crossing is the n above which a card takes less time for a product than one thread of this CPU, which the script measures. A product of
other than square matrices counts as a product of n×n matrices with the same FLOPs.

The bars: in each region an error of at most 20 % and 85 % of the intervals; 8 of 10 crossings within a factor of 1.5.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

sys.path.append(str(Path(__file__).parents[1]))

from harness import arguments, rows, write_result, zoo_batch, zoo_task
from main import Fit, Measured, predicted, read

from batchscope.choice.crossing import Line, crossings
from batchscope.choice.interval import digits, exactly
from batchscope.choice.kernels import GROUPS, is_compute, roof_seconds
from batchscope.choice.launches import BELOW_AUTOGRAD, THROUGH_CUDNN, on_other_host
from batchscope.choice.scale import rows_at
from batchscope.choice.work import Work, expand_row
from batchscope.errors import exit_on_user_error, refuse_in_one_line
from batchscope.hardware.datasheet import Datasheet
from batchscope.hardware.operations import OperationRecorder
from batchscope.hardware.products import Product, time_products
from batchscope.records.operations import StepOperations

MODELS = {"cnn": ("cnn",), "stacked_lstm": ("stacked_lstm",), "resnet18": ("torchvision", "model.name=resnet18")}
RECORDED, SIZES = (2, 8, 16), (1, 8, 64, 512, 4096)  # batch sizes; a ResNet cannot train on one image of 32 × 32
LAUNCH_S = 15e-6
REGIONS = ("launches", "memory", "arithmetic")
MOST_ERROR, LEAST_HELD, MOST_AWAY = 20, 85, 4  # percent, percent, factor
FAR, FEWEST = "further away", 10  # the label of cases that are not judged, and the fewest cases of a judged row
FACTOR, LEAST_CROSSINGS = 1.5, 8 / 10
SHORT_S = 10e-6  # a shorter kernel ends before the host is done
HEAD = ["region", "model", "cases", "error", "holds", "width", "away", "within the bars"]
ENDS = ("low", "middle", "high")
CPU_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def step_of(model: str, options: Sequence[str], batch_size: int) -> StepOperations:
    """The operations of a training step, as a run records them."""
    task = zoo_task(model, *options)
    optimizer = torch.optim.AdamW(task.parameters(), fused=True)
    x, y = zoo_batch(model, batch_size)
    part = ["forward"]
    recorder = OperationRecorder(task, part=lambda: part[0])
    with recorder:
        loss = torch.nn.functional.cross_entropy(task.model(x), y)
        part[0] = "backward"
        loss.backward()
        part[0] = "optimizer"
        optimizer.step()
    return StepOperations(batch_size, 1.0, "cpu", "", "32-true", recorder.operations())


def works(model: str) -> Iterator[tuple[int, Work]]:
    """Each batch size with the distinct operations of a step."""
    name, *options = MODELS[model]
    steps = {size: step_of(name, options, size) for size in RECORDED}
    for size in SIZES:
        unique = {(work.kind, work.flops, work.bytes): work for row in rows_at(steps, size) for work in expand_row(row)}
        yield from ((size, work) for work in unique.values())


def kernels(measured: Measured, fitted: Measured) -> pd.DataFrame:
    """The measurements with the predictions of their kernels, each card without measurements of its own chip."""
    fit, chips = (
        Fit(fitted),
        {name: (card.sms, card.clock_mhz) for name, card in (measured.cards | fitted.cards).items()},
    )
    return predicted(
        measured, lambda name: fit.coefficients([device for device in fitted.devices if chips[device] != chips[name]])
    )


def hosts_of(small: pd.DataFrame) -> dict[str, pd.Series]:
    """By kind, the seconds until a kernel starts, by card: half of what calls of the shortest kernels take."""
    short = small[small["middle"] < SHORT_S]
    return {kind: calls.groupby("device")["seconds"].median() / 2 for kind, calls in short.groupby("kind")}


def called_alone(predictions: pd.DataFrame, small: pd.DataFrame) -> pd.DataFrame:
    """The predictions of calls that begin on an idle device, from predictions of kernels.

    Until the kernel starts, the host needs a while, and until the second event about as long again, which is the least that a call
    takes. How long is not the card's: it is half of what calls of the shortest kernels take with the other cards of `small`.
    """
    hosts, frames = hosts_of(small), []
    for (kind, device), calls in predictions.groupby(["kind", "device"], sort=False):
        of_kind = hosts.get("linear" if kind == "convolution" else kind)  # few convolutions are that short
        if of_kind is not None:
            starts = on_other_host(exactly(of_kind.drop(device, errors="ignore").median())).ends()  # on another host
            delays = (BELOW_AUTOGRAD * (THROUGH_CUDNN - 1) * (kind == "convolution")).ends()
            ends = {
                name: (calls[name] + start).clip(lower=2 * start) + delay
                for name, start, delay in zip(ENDS, starts, delays, strict=True)
            }
            frames.append(calls.assign(**ends))
    return pd.concat(frames)


def nearest(work: Work, measured: pd.DataFrame) -> tuple[int, float]:
    """The place of the measured operation that is nearest, and the larger of the factors between their FLOPs and bytes."""
    group = work.kind if work.kind in set(measured["group"]) else "products" if work.flops else "elementwise"
    apart = np.abs(np.log(measured["bytes"] / work.bytes))
    if work.flops:
        apart = np.maximum(apart, np.abs(np.log(measured["flops"] / work.flops)))
    apart = apart.where(measured["group"] == group, np.inf).to_numpy()
    return int(apart.argmin()), float(np.exp(apart.min()))


def cases(calls: pd.DataFrame, cards: Mapping[str, Datasheet]) -> pd.DataFrame:
    """A row for each operation of a step on a card: its model, batch size, and the nearest measured operation with its prediction."""
    calls = calls.assign(
        flops=[work.flops for work in calls["work"]],
        bytes=[work.bytes for work in calls["work"]],
        group=calls["kind"].replace({"linear": "products", "bmm": "products"}),
        region=[region(work, cards[device]) for work, device in zip(calls["work"], calls["device"], strict=True)],
    )
    records = []
    for model in MODELS:
        of_model = list(works(model))
        for _, operations in calls.groupby("device"):
            for size, work in of_model:
                position, away = nearest(work, operations)
                records.append({"model": model, "size": size, "away": away, **operations.iloc[position]})
    table = pd.DataFrame(records)
    table = table[table["away"] < np.inf]  # without cards that have only convolutions in the folder
    return table.assign(
        error=(table["middle"] / table["seconds"] - 1).abs(),
        holds=table["seconds"].between(table["low"], table["high"]).astype(float),
        width=(table["high"] - table["low"]) / table["middle"],
    )


def region(work: Work, card: Datasheet) -> str:
    """The part of a separately measured call that takes longest by the datasheet."""
    if roof_seconds(work, card) < LAUNCH_S:
        return "launches"
    return "arithmetic" if is_compute(work, card) and GROUPS.get(work.kind) != "memory" else "memory"


def judged(operations: pd.DataFrame) -> tuple[list[list[str]], bool]:
    """The lines of a table by region, and by model within each; whether each region is within the bars."""
    lines, is_good = [], True
    operations = operations.assign(near=operations["away"] <= MOST_AWAY)
    for name in REGIONS:
        of_region = operations[operations["region"] == name]
        for model in ("all", *MODELS, FAR):
            group = of_region[of_region["near"] != (model == FAR)]
            group = group if model in ("all", FAR) else group[group["model"] == model]
            if group.empty:
                lines.append([name, model, "0", *"–––––"])
                continue
            error, held = 100 * group["error"].median(), 100 * group["holds"].mean()
            is_within, is_judged = error <= MOST_ERROR and held >= LEAST_HELD, model != FAR and len(group) >= FEWEST
            is_good &= is_within or not is_judged or model != "all"
            numbers = [
                f"{error:.1f}",
                f"{held:.1f}",
                f"{100 * group['width'].median():.0f}",
                f"{group['away'].median():.2g}",
            ]
            verdict = ("yes" if is_within else "**no**") if is_judged else "–"
            lines.append([name, model, f"{len(group):,}", *numbers, verdict])
    return lines, is_good


def crossing_rows(calls: pd.DataFrame, seconds: Mapping[int, float]) -> Iterator[tuple[str, str, float, float]]:
    """For each card and kind of product: its name, the kind, and the n of the crossing with a CPU, measured and predicted.

    Args:
        every: the measurements with the predictions of these calls.
        seconds: of a product of n×n matrices on the CPU, by n.
    """
    calls = calls.assign(n=[(work.flops / 2) ** (1 / 3) for work in calls["work"]])
    calls["n"] = 2 ** ((2 * np.log2(calls["n"])).round() / 2)  # rounded to half octaves
    for (device, kind), group in calls[calls["kind"].isin(["linear", "bmm"])].groupby(["device", "kind"]):
        medians = group.groupby("n")[["seconds", "middle"]].median().loc[lambda frame: frame.index <= max(CPU_SIZES)]
        times = {name: {n: exactly(value) for n, value in medians[name].items()} for name in medians}
        on_cpu = np.interp(np.log(medians.index), np.log(list(seconds)), np.log(list(seconds.values())))
        lines = [Line("cpu", True, {n: exactly(value) for n, value in zip(medians.index, np.exp(on_cpu), strict=True)})]
        crossing = crossings([*lines, *(Line(name, False, by_n) for name, by_n in times.items())])
        yield str(device), str(kind), crossing["seconds"].middle, crossing["middle"].middle


def cpu_seconds() -> dict[int, float]:
    """By n, the median seconds of a product of n×n matrices on one thread of this CPU: with two, other programs make them wait for each other."""
    torch.set_num_threads(1)
    timings = time_products([Product(n, n, n) for n in CPU_SIZES], torch.device("cpu"), 1e10, 30.0, lambda text: None)
    return {product.n: float(np.median(timed.product)) for product, timed in timings.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--fit", type=Path, required=True, metavar="DIR", help="folder with the measurements to fit")
    parser.add_argument("--small", type=Path, metavar="DIR", help="folder with smaller products, for the crossing")
    refuse_in_one_line(parser)
    args = parser.parse_args()
    fitted = read(args.fit)
    sources = {args.fit.name: (kernels(fitted, fitted), fitted.cards)}
    if args.small:
        measured = read(args.small)
        small = kernels(measured, fitted)
        sources = {name: (called_alone(calls, small), cards) for name, (calls, cards) in sources.items()}
        sources[args.small.name] = called_alone(small, small), measured.cards
    parts, data = [], {}
    for name, (predictions, cards) in sources.items():
        data[name], is_good = judged(cases(predictions, cards))
        parts += [
            f"**{name}**: {'every' if is_good else 'not every'} region is within the bars.",
            rows(HEAD, data[name], 2),
        ]
    if args.small:
        hosts = {kind: starts for kind, starts in hosts_of(small).items() if kind != "convolution"}
        apart = [starts[name] / starts.drop(name).median() for starts in hosts.values() for name in starts.index]
        parts.append(f"A host takes {min(apart):.2f} to {max(apart):.2f} times as long as the median of the others.")
        cpu = cpu_seconds()
        table = list(crossing_rows(predictions, cpu))
        apart = [max(measured / estimate, estimate / measured) for *_, measured, estimate in table]
        within = sum(factor <= FACTOR for factor in apart)
        verdict = "enough" if within >= LEAST_CROSSINGS * len(apart) else "**not enough**"
        lines = [[*row[:2], *(f"{n:.0f}" for n in row[2:]), f"{by:.2f}"] for row, by in zip(table, apart, strict=True)]
        text = f"{within} of {len(apart)} crossings are within a factor of {FACTOR}, which is {verdict}"
        parts += [f"{text} (this CPU: {digits(cpu[64] * 1e6)} µs for n = 64, {digits(cpu[512] * 1e6)} µs for n = 512)."]
        parts += [rows(["card", "product", "measured n", "predicted n", "factor"], lines, 2)]
        data["crossings"] = table
    write_result("held_out", "\n\n".join(parts), data, args)


if __name__ == "__main__":
    exit_on_user_error(main)
