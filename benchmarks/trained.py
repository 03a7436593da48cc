"""Do trained sweeps name a batch size that trains as well as the best, and is fast? Long references judge each sweep.

    python benchmarks/trained.py --root ../shared/data                  # four hours
    python benchmarks/trained.py --root ../shared/data --only mlp

Sweeps as users start them, of three models, sizes of 32 to 1,024 and one epoch: with one seed and with three, on a quiet
machine and beside a process that takes a core all the time. These are twelve sweeps. Each is judged by

- ten other seeds at the same epochs: the mean test accuracy of the named size lies within the margin of the best one
  (1 point, or a third of the best's error, whichever is less);
- a timed sweep of at least 60 passes beside the same load: of the sizes within the margin, the named one has at least 0.85
  of the best rate.

On a quiet machine each sweep with one seed is repeated with `timing=false`, which trains the same runs plainly: a sweep should
take at most 1.1 times as long plus 15 s.

Finished sweeps are kept below outputs/bench-trained with their commit, and are not repeated.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from answers import commit_of, run_sweep
from harness import arguments, folder_of, rows, write_result

from batchscope import read_answer, read_runs
from batchscope.analysis.read import read_sweep
from batchscope.errors import exit_on_user_error

MODELS = ("cnn", "mlp", "stacked_lstm")
SIZES = "32,64,128,256,512,1024"
SEEDS = ("0", "0,1,2")
CONDITIONS = ("quiet", "steady")
REFERENCE_SEEDS = ",".join(map(str, range(100, 110)))
LONG = ("experiment=throughput", "callbacks.until_known.min_passes=60", "callbacks.until_known.seconds=20")
WANTED_RATE, SLOWER, LATER_S = 0.85, 1.1, 15.0
METRIC = "test/acc"


class Sweep(NamedTuple):
    """A sweep that is judged."""

    model: str
    seeds: str
    condition: str

    @property
    def name(self) -> str:
        """`cnn-1-seed-quiet`."""
        return f"{self.model}-{self.seeds.count(',') + 1}-seed-{self.condition}"


class Reference(NamedTuple):
    """The accuracy and the rate of each size of a model, from long measurements."""

    accuracy: Mapping[int, float]
    rate: Mapping[int, float]

    @property
    def margin(self) -> float:
        """By how much an accuracy may lie below the best one."""
        best = max(self.accuracy.values())
        return min(0.01, (1 - best) / 3)

    def loss(self, size: int) -> float:
        """By how much the accuracy of a size lies below the best one."""
        return max(self.accuracy.values()) - self.accuracy[size]

    def share(self, size: int) -> float:
        """The rate of a size ÷ the best rate among the sizes within the margin."""
        return self.rate[size] / max(rate for rival, rate in self.rate.items() if self.loss(rival) <= self.margin)


def reference_of(trained: Path, timed: Path) -> Reference:
    """The mean accuracy of each size over the seeds of the sweep `trained`, and its rate in the sweep `timed`."""
    runs = read_runs(trained)
    accuracy = runs.groupby("batch_size")[METRIC].mean()
    (group,) = read_sweep([timed]).groups
    return Reference(
        {int(size): float(value) for size, value in accuracy.items()},
        {size: group.rates.rate(size) for size in sorted(group.rates.settings)},
    )


def judged(sweep: Sweep, folder: Path, seconds: float, reference: Reference) -> dict[str, Any]:
    """The size that a sweep named, judged by a reference."""
    (answer,) = read_answer(folder)["groups"]
    size = answer["chosen"]
    judged = {"sweep": sweep.name, "chosen": size, "rule": answer["rule"], "lines": answer["lines"], "seconds": seconds}
    judged |= {"named": size is not None, "accurate": False, "fast": False}
    if size is not None:
        judged |= {"loss": reference.loss(size), "share": reference.share(size)}
        judged["accurate"] = judged["loss"] <= reference.margin
        judged["fast"] = judged["accurate"] and judged["share"] >= WANTED_RATE
    return judged


def page(sweeps: Sequence[Mapping[str, Any]], plain: Mapping[str, float], references: Mapping[str, Reference]) -> str:
    """The table of the sweeps, how many are as wanted, the cost of timing, and the references."""
    lines = []
    for sweep in sweeps:
        is_named = sweep["named"]
        loss, share = (f"{100 * sweep['loss']:.2f}", f"{sweep['share']:.2f}") if is_named else ("", "")
        lines.append([sweep["sweep"], sweep["chosen"] or "none", sweep["rule"], loss, share, f"{sweep['seconds']:.0f}"])
    head = ["sweep", "named", "rule", "points below the best", "share of the best rate", "s"]
    counts = ", ".join(f"{sum(sweep[key] for sweep in sweeps)} {key}" for key in ("named", "accurate", "fast"))
    part = "" if len(references) == len(MODELS) * len(CONDITIONS) else "A part of the benchmark. "
    text = [rows(head, lines), "", f"{part}Of {len(sweeps)} sweeps: {counts}. Wanted: all but one of each.", ""]
    seconds = {sweep["sweep"]: sweep["seconds"] for sweep in sweeps}
    for name, plain_s in plain.items():
        word = "as wanted" if seconds[name] <= SLOWER * plain_s + LATER_S else "longer than wanted"
        text.append(f"- {name}: {seconds[name]:.0f} s, plainly {plain_s:.0f} s: {word}")
    text += ["", "The references: the mean test accuracy of ten seeds in percent, and samples/s.", ""]
    for name, truth in references.items():
        of_sizes = ", ".join(f"{s}: {100 * truth.accuracy[s]:.2f}, {truth.rate[s]:,.0f}" for s in sorted(truth.rate))
        text.append(f"- {name}, margin {100 * truth.margin:.2f} points: {of_sizes}")
    return "\n".join(text)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, help="measure and judge these alone")
    args = parser.parse_args()
    sizes, seeds, of_reference, conditions, extra = SIZES, SEEDS, REFERENCE_SEEDS, CONDITIONS, []
    if args.smallest:
        args.only, sizes, seeds, of_reference, conditions = ["mlp"], "16,64", ("0",), "100,101", ("quiet",)
        extra = ["data=digits", "data.num_train=400", "trainer.limit_test_batches=2"]
    out = folder_of("bench-trained", args)
    cases = [Sweep(*levels) for levels in itertools.product(args.only, seeds, conditions)]
    common = ["trainer.accelerator=cpu", f"data.batch_size={sizes}", f"data.root={args.root}", *extra]
    one_epoch = [*common, "trainer.max_epochs=1"]
    words: dict[Path, tuple[list[str], Sweep]] = {}
    plain_sweeps = {out / f"{model}-plain": Sweep(model, seeds[0], "quiet") for model in args.only}
    # Accuracy does not depend on the load: its references come between the quiet hour and the loaded one.
    for condition in conditions:
        for case in (case for case in cases if case.condition == condition):
            words[out / case.name] = [f"model={case.model}", f"seed={case.seeds}", *one_epoch], case
        for model in args.only:
            words[out / f"{model}-rates-{condition}"] = [f"model={model}", *LONG, *common], Sweep(model, "0", condition)
        trained = {**plain_sweeps, **{out / f"{m}-reference": Sweep(m, of_reference, "quiet") for m in args.only}}
        for folder, case in trained.items():
            words[folder] = [f"model={case.model}", f"seed={case.seeds}", *one_epoch, "timing=false"], case
    commit_of(list(words), out)
    seconds = {}
    for folder, (line, case) in words.items():
        seconds[folder] = run_sweep(folder, line, case.condition)
        print(f"{folder.name}: {seconds[folder]:.0f} s", flush=True)
    references = {
        f"{model}-{condition}": reference_of(out / f"{model}-reference", out / f"{model}-rates-{condition}")
        for model, condition in itertools.product(args.only, conditions)
    }
    sweeps = [
        judged(case, out / case.name, seconds[out / case.name], references[f"{case.model}-{case.condition}"])
        for case in cases
    ]
    plain = {case.name: seconds[folder] for folder, case in plain_sweeps.items()}
    data = {"commit": commit_of(list(words), out), "sweeps": sweeps, "plain": plain}
    data["references"] = {name: reference._asdict() for name, reference in references.items()}
    write_result("trained", page(sweeps, plain, references), data, args)


if __name__ == "__main__":
    exit_on_user_error(main)
