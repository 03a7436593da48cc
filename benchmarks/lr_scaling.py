"""Which rule should the learning rate follow where the batch size changes?

    python benchmarks/lr_scaling.py --root ../shared/data              # 2.5 hours
    python benchmarks/lr_scaling.py --root ../shared/data --seeds 1    # what a third of that has shown

The CNN, the MLP and the StackedLSTM are trained on MNIST at batch sizes from 32 to 2,048, for one epoch and for three, by each
rule of optimizer.lr_scaling and with three seeds. All else is as the configs have it: AdamW, one_cycle, a rate for 128 samples; of
SGD, for which `auto` is linear, nothing is measured. At the reference the rules are one training. The accuracy is that of the
last weights on the test set; of a loss that is not finite it is that of guessing.

The criterion, written before there was a result. A case is a model, a number of epochs and a batch size other than the reference.
`auto`, here sqrt, becomes the default if

1. it is as good as the best rule everywhere within its noise: in no case its error ÷ that of the rule with the best mean
   accuracy (geometric means over the seeds) exceeds what chance gives, with 95 % confidence for all cases together; and
2. no other rule loses fewer points to the best one, on average over all cases.

Chance is what the log error of the seeds differs by. Its variance is the typical one of a model and a number of epochs: the median over
sizes and rules, over that of a χ² distribution, so that a rule whose seeds fail now and then does not excuse itself.

Two trainings of one thread each run at a time, seed after seed. What is done is kept below outputs/bench-lr-scaling, with the commit
that it is of, and not done again: interrupted, the same command goes on. To train other code, delete that folder.
"""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from answers import commit_of, current_commit, facts_file
from harness import ROOT, arguments, folder_of, rows, write_result
from scipy.special import gammaincinv, stdtrit

from batchscope.errors import UserError, exit_on_user_error
from batchscope.files import write_text
from batchscope.options.compose import check_command_line
from batchscope.records.formatting import count, duration, percent
from batchscope.records.read import read
from batchscope.training.build import build_optimizer

MODELS = {"cnn": 30, "mlp": 8, "stacked_lstm": 60}  # seconds of an epoch on one thread, from which the order follows
SIZES, EPOCHS, RULES, SEEDS = (32, 64, 128, 256, 512, 1024, 2048), (1, 3), ("none", "sqrt", "linear"), 3
SMALLEST = ["model.hidden_sizes=[8]", "data.num_train=256", "data.num_test=200"]
# Without what has no part in learning.
QUICK = ["callbacks=none", "logger=none", "trainer.limit_val_batches=0", "trainer.accelerator=cpu"]
START_UP = 10  # seconds of a training beside its epochs
AT_ONCE, CONFIDENCE, NOTHING_WRONG = 2, 0.95, 5e-5  # the error of half an image of the test set
(_CONFIG,) = check_command_line(["model=cnn", "data=mnist", "optimizer.lr_scaling=auto"], multirun=False)
AUTO, REFERENCE = build_optimizer(_CONFIG["optimizer"]).rule, _CONFIG["optimizer"]["reference_batch_size"]
CASE = ["epochs", "model", "size"]


class Training(NamedTuple):
    """A training; at the reference size its rule is `none`, and stands for all."""

    seed: int
    model: str
    epochs: int
    size: int
    rule: str

    @property
    def place(self) -> str:
        """Its folder: `0/cnn-1-epochs-32-sqrt`."""
        return f"{self.seed}/{self.model}-{self.epochs}-epochs-{self.size}-{self.rule}"

    @property
    def expected(self) -> float:
        """Seconds, roughly."""
        return START_UP + MODELS[self.model] * self.epochs

    @property
    def words(self) -> list[str]:
        """The options of its command."""
        options = {"model": self.model, "data.batch_size": self.size, "trainer.max_epochs": self.epochs}
        options |= {"optimizer.lr_scaling": self.rule, "seed": self.seed}
        return ["data=mnist", *QUICK, *(f"{option}={value}" for option, value in options.items())]


def trainings(models: Sequence[str], epochs: Sequence[int], sizes: Sequence[int], seeds: int) -> list[Training]:
    """All of them, seed after seed, and of a seed the longest first."""
    every = itertools.product(range(seeds), models, epochs, sizes, RULES)
    found = [Training(*one) for one in every if one[3] != REFERENCE or one[4] == RULES[0]]
    return sorted(found, key=lambda one: (one.seed, -one.expected))


def train(one: Training, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """What came of a training, which is not done twice.

    Raises:
        UserError: if it fails.
    """
    place = folder / one.place
    file = facts_file(place)
    if not file.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        commit, started, log = current_commit(), time.perf_counter(), place.with_suffix(".log")
        line = [sys.executable, "train.py", *one.words, *options, f"hydra.run.dir={place}"]
        with log.open("w") as out:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(line, cwd=ROOT, env=environment, check=False, stdout=out, stderr=subprocess.STDOUT)
        if done.returncode:
            raise UserError(f"{place}: failed, as {log.name} says; the next start tries it again")
        write_text(file, json.dumps({"seconds": time.perf_counter() - started, "commit": commit}))
    record, facts = read(place), json.loads(file.read_text())
    found = {
        "acc": record["metrics"]["test/acc"],
        "learning_rate": record["learning_rate"],
        "seconds": facts["seconds"],
    }
    return {**one._asdict(), **found}


def train_all(every: Sequence[Training], folder: Path, options: Sequence[str]) -> pd.DataFrame:
    """A row for each training, with the time that is left printed after each."""
    found, took = [], 0.0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {pool.submit(train, one, folder, options): one for one in every}
        left, expected = sum(one.expected for one in every), 0.0
        try:
            for future in as_completed(futures):
                one, done = futures[future], future.result()
                found.append(done)
                took, expected, left = took + done["seconds"], expected + one.expected, left - one.expected
                rest = duration(left * took / expected / AT_ONCE)
                said = f"{one.place}: {percent(done['acc'], digits=2)} after {done['seconds']:.0f} s"
                print(f"{len(found)} of {len(every)}, {rest} left; {said}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return pd.DataFrame(found)


# --- what they show


class Shown(NamedTuple):
    """What trainings show, by case and rule; `cases` leave out the reference."""

    arms: pd.DataFrame  # `mean` and `sd` of the accuracy, `log` of the error
    seeds: int  # of each training
    cases: pd.DataFrame  # `loss` to the best rule, `ratio` of the errors, `limit` of that ratio


def shown(runs: pd.DataFrame) -> Shown:
    """The accuracies, and what each rule loses to the best one in each case."""
    runs, seeds = runs.assign(log=np.log((1 - runs["acc"]).clip(lower=NOTHING_WRONG))), runs["seed"].nunique()
    of_arms = runs.groupby([*CASE, "rule"])
    arms = pd.DataFrame({"mean": of_arms["acc"].mean(), "sd": of_arms["acc"].std(), "log": of_arms["log"].mean()})
    freedom, variances = seeds - 1, of_arms["log"].var().groupby(["epochs", "model"])
    cases = arms[arms.index.get_level_values("size") != REFERENCE].copy()
    if freedom:
        typical = variances.median() * (freedom / 2) / gammaincinv(freedom / 2, 0.5)
        others = len(cases) - len(cases.groupby(CASE))  # comparisons
        quantile = stdtrit(variances.size(), CONFIDENCE ** (1 / others))
        limits = np.exp(quantile * (2 * typical / seeds) ** 0.5)
        cases["limit"] = [limits[key[:2]] for key in cases.index]
    else:
        cases["limit"] = math.nan
    best = cases.loc[cases.groupby(CASE)["mean"].idxmax()].droplevel("rule")
    cases["loss"] = best["mean"].reindex(cases.droplevel("rule").index).to_numpy() - cases["mean"]
    cases["ratio"] = np.exp(cases["log"] - best["log"].reindex(cases.droplevel("rule").index).to_numpy())
    return Shown(arms, seeds, cases)


def name_of(case: Sequence[Any]) -> str:
    """`cnn at 32 after 1 epoch`."""
    epochs, model, size = case[:3]
    return f"{model} at {size:,} after {count(epochs, 'epoch')}"


def decision(found: Shown) -> str:
    """The sentence that decides."""
    cases, name = found.cases, f"`auto`, here {AUTO},"
    auto = cases.xs(AUTO, level="rule")
    if found.seeds < SEEDS:
        number = "One seed does" if found.seeds == 1 else f"{found.seeds} seeds do"
        return f"{number} not decide whether {name} is as good as the best rule."
    worse = auto[auto["ratio"] > auto["limit"]]
    if len(worse):
        at = "; ".join(
            f"{name_of(case)} ({row.ratio:.2f} × the error)"
            for case, row in zip(worse.index, worse.itertuples(), strict=True)
        )
        everywhere = f"{name} is not as good as the best rule everywhere within its noise"
        return f"{everywhere}: it is worse for {at}. It does not become the default."
    losses = cases["loss"].groupby("rule").mean()
    everywhere = f"{name} is as good as the best rule everywhere within its noise"
    if losses[AUTO] > losses.min():
        return f"{everywhere}, but {losses.idxmin()} loses less on average. It does not become the default."
    return f"{everywhere}, and loses least on average. It becomes the default."


# --- the page


def accuracies(arms: pd.DataFrame, epochs: int) -> str:
    """A table: the accuracy in percent by model, size and rule; the best of a row is bold."""
    lines = []
    for (model, size), of_size in arms.loc[epochs].groupby(level=["model", "size"]):
        best = of_size["mean"].max()
        cells = {}
        for (*_, rule), arm in of_size.iterrows():
            sd = "" if math.isnan(arm["sd"]) else f" ± {100 * arm['sd']:.2f}"
            text = f"{100 * arm['mean']:.2f}{sd}"
            cells[rule] = f"**{text}**" if arm["mean"] == best and size != REFERENCE else text
        lines.append([model, f"{size:,}", *(cells.get(rule, "the same") for rule in RULES)])
    return rows(["model", "batch size", *RULES], lines)


def losses(cases: pd.DataFrame) -> str:
    """A table: what each rule loses to the best one of its case, in points, and where it loses most."""
    lines = []
    for rule in RULES:
        of_rule = cases.xs(rule, level="rule")
        worst = of_rule["loss"].idxmax()
        worse = "–" if of_rule["limit"].isna().any() else int((of_rule["ratio"] > of_rule["limit"]).sum())
        numbers = [f"{100 * of_rule['loss'].mean():.2f}", f"{100 * of_rule['loss'].max():.2f}"]
        lines.append([rule, *numbers, name_of(worst), len(of_rule), worse])
    return rows(["rule", "mean loss, points", "worst loss, points", "which is of", "cases", "shown to be worse"], lines)


def extent(done: int, seeds: int, commit: str) -> str:
    """How much of the benchmark a page is of."""
    full = len(trainings([*MODELS], EPOCHS, SIZES, SEEDS))
    kind = "All" if done == full else "A part of the benchmark:"
    return f"{kind} {done} trainings of {full}, with {count(seeds, 'seed')}, on one thread each, at commit {commit}."


def page(runs: pd.DataFrame, commit: str) -> str:
    """The tables, what chance gives, and the decision."""
    found, seeds = shown(runs), runs["seed"].nunique()
    text = [extent(len(runs), seeds, commit), "Test accuracy in percent, mean ± standard deviation over the seeds.", ""]
    for epochs in sorted(runs["epochs"].unique()):
        text += [f"**After {count(epochs, 'epoch')}**", "", accuracies(found.arms, epochs), ""]
    limits = found.cases["limit"]
    text += ["What a rule loses to the best one of its model, epochs and batch size:", "", losses(found.cases), ""]
    if seeds > 1:
        span = f"{limits.min():.2f} to {limits.max():.2f}"
        text += [f"Shown to be worse is an error of {span} times that of the best rule, by model and epochs."]
    return "\n".join([*text, decision(found)])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(1, SEEDS + 1), help=f"of {SEEDS}")
    args = parser.parse_args()
    options, folder = ["data.offline=error"], folder_of("bench-lr-scaling", args)
    every = trainings([*MODELS], EPOCHS, SIZES, args.seeds)
    if args.smallest:
        options, every = SMALLEST, trainings(["mlp"], [1], [32, REFERENCE], 2)
    places = [folder / one.place for one in every]
    commit_of(places, folder)
    runs = train_all(every, folder, [f"data.root={args.root}", *options])
    commit = commit_of(places, folder)
    data = {"commit": commit, "auto": AUTO, "trainings": runs.sort_values(["seed", *CASE, "rule"]).to_dict("records")}
    write_result("lr_scaling", page(runs, commit), data, args)


if __name__ == "__main__":
    exit_on_user_error(main)
