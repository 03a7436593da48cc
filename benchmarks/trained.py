"""Do trained sweeps name a batch size that trains as well as the best, and is fast? Each is held against long references.

    python benchmarks/trained.py --root ../shared/data                  # four hours
    python benchmarks/trained.py --root ../shared/data --only mlp

Sweeps as users start them, of three models, sizes of 32 to 1,024 and one epoch: with one seed and with three, on a quiet
machine and beside a process that takes a core all the time. That makes twelve. Each is judged by

- ten other seeds at the same epochs: the mean test accuracy of the named size lies within the margin of the best one
  (1 point, or a third of the best's error, whichever is less);
- a timed sweep of at least 60 passes beside the same load: of the sizes within the margin, the named one has at least 0.85
  of the best rate.

On a quiet machine each sweep with one seed is started again with `timing=false`, which trains the same runs plainly: a sweep
takes at most 1.1 times as long, and 15 s.

What has been measured is kept below outputs/bench-trained, with the commit that it is of, and not measured again.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from answers import commit_of, done
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
    """What long measurements of a model say of each size."""

    accuracy: Mapping[int, float]
    rate: Mapping[int, float]

    @property
    def margin(self) -> float:
        """By how much an accuracy may be below the best one."""
        best = max(self.accuracy.values())
        return min(0.01, (1 - best) / 3)

    def loss(self, size: int) -> float:
        """By how much the accuracy of a size is below the best one."""
        return max(self.accuracy.values()) - self.accuracy[size]

    def share(self, size: int) -> float:
        """The rate of a size ÷ the best rate among the sizes within the margin."""
        return self.rate[size] / max(rate for other, rate in self.rate.items() if self.loss(other) <= self.margin)


def reference_of(trained: Path, timed: Path) -> Reference:
    """The mean accuracy of each size over the seeds of a sweep, and its rate in another one."""
    runs = read_runs(trained)
    accuracy = runs.groupby("batch_size")[METRIC].mean()
    (group,) = read_sweep([timed]).groups
    return Reference(
        {int(size): float(value) for size, value in accuracy.items()},
        {size: group.rates.rate(size) for size in sorted(group.rates.settings)},
    )


def judged(sweep: Sweep, place: Path, seconds: float, reference: Reference) -> dict[str, Any]:
    """What a sweep has named, and what the references say of it."""
    (answer,) = read_answer(place)["groups"]
    size = answer["chosen"]
    judged = {"sweep": sweep.name, "chosen": size, "rule": answer["rule"], "lines": answer["lines"], "seconds": seconds}
    judged |= {"named": size is not None, "accurate": False, "fast": False}
    if size is not None:
        judged |= {"loss": reference.loss(size), "share": reference.share(size)}
        judged["accurate"] = judged["loss"] <= reference.margin
        judged["fast"] = judged["accurate"] and judged["share"] >= WANTED_RATE
    return judged


def page(sweeps: Sequence[Mapping[str, Any]], plain: Mapping[str, float], references: Mapping[str, Reference]) -> str:
    """The table of the sweeps, how many are as wanted, what timing costs, and the references."""
    lines = []
    for one in sweeps:
        known = one["named"]
        loss, share = (f"{100 * one['loss']:.2f}", f"{one['share']:.2f}") if known else ("", "")
        lines.append([one["sweep"], one["chosen"] or "none", one["rule"], loss, share, f"{one['seconds']:.0f}"])
    head = ["sweep", "named", "rule", "points below the best", "share of the best rate", "s"]
    counts = ", ".join(f"{sum(one[key] for one in sweeps)} {key}" for key in ("named", "accurate", "fast"))
    part = "" if len(references) == len(MODELS) * len(CONDITIONS) else "A part of the benchmark. "
    text = [rows(head, lines), "", f"{part}Of {len(sweeps)} sweeps: {counts}. Wanted: all but one of each.", ""]
    seconds = {one["sweep"]: one["seconds"] for one in sweeps}
    for name, alone in plain.items():
        word = "as wanted" if seconds[name] <= SLOWER * alone + LATER_S else "longer than wanted"
        text.append(f"- {name}: {seconds[name]:.0f} s, plainly {alone:.0f} s: {word}")
    text += ["", "The references: the mean test accuracy of ten seeds in percent, and samples/s.", ""]
    for name, found in references.items():
        of_sizes = ", ".join(f"{s}: {100 * found.accuracy[s]:.2f}, {found.rate[s]:,.0f}" for s in sorted(found.rate))
        text.append(f"- {name}, margin {100 * found.margin:.2f} points: {of_sizes}")
    return "\n".join(text)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, help="measure and judge these alone")
    args = parser.parse_args()
    sizes, seeds, of_reference, conditions, more = SIZES, SEEDS, REFERENCE_SEEDS, CONDITIONS, []
    if args.smallest:
        args.only, sizes, seeds, of_reference, conditions = ["mlp"], "16,64", ("0",), "100,101", ("quiet",)
        more = ["data=digits", "data.num_train=400", "trainer.limit_test_batches=2"]
    out = folder_of("bench-trained", args)
    cases = [Sweep(*one) for one in itertools.product(args.only, seeds, conditions)]
    usual = ["trainer.accelerator=cpu", f"data.batch_size={sizes}", f"data.root={args.root}", *more]
    one_epoch = [*usual, "trainer.max_epochs=1"]
    words: dict[Path, tuple[list[str], Sweep]] = {}
    plainly = {out / f"{model}-plain": Sweep(model, seeds[0], "quiet") for model in args.only}
    # The references of accuracy, which no load changes, come between the quiet hour and the other.
    for condition in conditions:
        for case in (case for case in cases if case.condition == condition):
            words[out / case.name] = [f"model={case.model}", f"seed={case.seeds}", *one_epoch], case
        for model in args.only:
            words[out / f"{model}-rates-{condition}"] = [f"model={model}", *LONG, *usual], Sweep(model, "0", condition)
        trained = {**plainly, **{out / f"{m}-reference": Sweep(m, of_reference, "quiet") for m in args.only}}
        for place, case in trained.items():
            words[place] = [f"model={case.model}", f"seed={case.seeds}", *one_epoch, "timing=false"], case
    commit_of(list(words), out)
    seconds = {}
    for place, (line, case) in words.items():
        seconds[place] = done(place, line, case.condition)
        print(f"{place.name}: {seconds[place]:.0f} s", flush=True)
    references = {
        f"{model}-{condition}": reference_of(out / f"{model}-reference", out / f"{model}-rates-{condition}")
        for model, condition in itertools.product(args.only, conditions)
    }
    sweeps = [
        judged(case, out / case.name, seconds[out / case.name], references[f"{case.model}-{case.condition}"])
        for case in cases
    ]
    plain = {case.name: seconds[place] for place, case in plainly.items()}
    data = {"commit": commit_of(list(words), out), "sweeps": sweeps, "plain": plain}
    data["references"] = {name: found._asdict() for name, found in references.items()}
    write_result("trained", page(sweeps, plain, references), data, args)


if __name__ == "__main__":
    exit_on_user_error(main)
