"""Which rule should the learning rate follow where the batch size changes?

    python benchmarks/lr_scaling.py --root ../shared/data              # 2.5 hours
    python benchmarks/lr_scaling.py --root ../shared/data --seeds 1    # what a third of that has shown

The CNN, the MLP and the StackedLSTM are trained on MNIST at batch sizes from 32 to 2,048, for one epoch and for three, with each
rule of optimizer.lr_scaling and three seeds. All other options are those of the configs: AdamW, one_cycle, a rate for 128 samples.
SGD, for which `auto` is linear, is not measured. At the reference size all rules give the same training. The accuracy is the test
accuracy of the last weights; a run whose loss is not finite has the accuracy of guessing.

The criterion, written before the first result. A case is a model, a number of epochs and a batch size other than the reference.
`auto`, here sqrt, becomes the default if

1. it is as good as the best rule everywhere within its noise: in no case its error ÷ that of the rule with the best mean
   accuracy (geometric means over the seeds) exceeds what chance gives, with 95 % confidence for all cases together; and
2. no other rule loses fewer points to the best one, on average over all cases.

Chance is the spread of the log error over seeds. Its variance is typical of a model and a number of epochs: the median over sizes and
rules ÷ the median of a χ² distribution, so that a rule with seeds that sometimes fail is not excused by its own spread.

Two trainings of one thread each run at a time, seed after seed. Finished trainings are kept below outputs/bench-lr-scaling with
their commit; after an interruption, the same command continues. To train other code, delete that folder.
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

MODELS = {"cnn": 30, "mlp": 8, "stacked_lstm": 60}  # seconds of an epoch on one thread, which decide the order
SIZES, EPOCHS, RULES, SEEDS = (32, 64, 128, 256, 512, 1024, 2048), (1, 3), ("none", "sqrt", "linear"), 3
SMALLEST = ["model.hidden_sizes=[8]", "data.num_train=256", "data.num_test=200"]
# Without everything that has no effect on learning.
QUICK = ["callbacks=none", "logger=none", "trainer.limit_val_batches=0", "trainer.accelerator=cpu"]
START_UP = 10  # seconds of a training beside its epochs
AT_ONCE, CONFIDENCE, NOTHING_WRONG = 2, 0.95, 5e-5  # the error of half an image of the test set
(_CONFIG,) = check_command_line(["model=cnn", "data=mnist", "optimizer.lr_scaling=auto"], multirun=False)
AUTO, REFERENCE = build_optimizer(_CONFIG["optimizer"]).rule, _CONFIG["optimizer"]["reference_batch_size"]
CASE = ["epochs", "model", "size"]


class Training(NamedTuple):
    """A training; at the reference size its rule is `none`, which stands for all rules."""

    seed: int
    model: str
    epochs: int
    size: int
    rule: str

    @property
    def path(self) -> str:
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
    """All trainings, seed after seed; the longest of a seed come first."""
    combinations = itertools.product(range(seeds), models, epochs, sizes, RULES)
    distinct = [Training(*levels) for levels in combinations if levels[3] != REFERENCE or levels[4] == RULES[0]]
    return sorted(distinct, key=lambda training: (training.seed, -training.expected))


def train(training: Training, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run a training, unless it is kept; its result.

    Raises:
        UserError: if the training fails.
    """
    run_folder = folder / training.path
    file = facts_file(run_folder)
    if not file.exists():
        shutil.rmtree(run_folder, ignore_errors=True)
        run_folder.parent.mkdir(parents=True, exist_ok=True)
        commit, started, log = current_commit(), time.perf_counter(), run_folder.with_suffix(".log")
        line = [sys.executable, "train.py", *training.words, *options, f"hydra.run.dir={run_folder}"]
        with log.open("w") as out:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.run(line, cwd=ROOT, env=environment, check=False, stdout=out, stderr=subprocess.STDOUT)
        if process.returncode:
            raise UserError(f"{run_folder}: failed, as {log.name} says; the next start tries it again")
        write_text(file, json.dumps({"seconds": time.perf_counter() - started, "commit": commit}))
    record, timing = read(run_folder), json.loads(file.read_text())
    result = {
        "acc": record["metrics"]["test/acc"],
        "learning_rate": record["learning_rate"],
        "seconds": timing["seconds"],
    }
    return {**training._asdict(), **result}


def train_all(planned: Sequence[Training], folder: Path, options: Sequence[str]) -> pd.DataFrame:
    """Run all trainings, and print the remaining time after each; a row for each training."""
    results, took = [], 0.0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {pool.submit(train, training, folder, options): training for training in planned}
        total, expected = sum(training.expected for training in planned), 0.0
        try:
            for future in as_completed(futures):
                training, result = futures[future], future.result()
                results.append(result)
                took, expected = took + result["seconds"], expected + training.expected
                remaining = duration((total - expected) * took / expected / AT_ONCE)
                outcome = f"{training.path}: {percent(result['acc'], digits=2)} after {result['seconds']:.0f} s"
                print(f"{len(results)} of {len(planned)}, {remaining} left; {outcome}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return pd.DataFrame(results)


# --- the results of the trainings


class Shown(NamedTuple):
    """The statistics of trainings by case and rule; `cases` leave out the reference size."""

    arms: pd.DataFrame  # `mean` and `sd` of the accuracy, `log` of the error
    seeds: int  # of each training
    cases: pd.DataFrame  # `loss` to the best rule, `ratio` of the errors, `limit` of that ratio


def shown(runs: pd.DataFrame) -> Shown:
    """The accuracies, and the loss of each rule to the best rule in each case."""
    runs, seeds = runs.assign(log=np.log((1 - runs["acc"]).clip(lower=NOTHING_WRONG))), runs["seed"].nunique()
    of_arms = runs.groupby([*CASE, "rule"])
    arms = pd.DataFrame({"mean": of_arms["acc"].mean(), "sd": of_arms["acc"].std(), "log": of_arms["log"].mean()})
    freedom, variances = seeds - 1, of_arms["log"].var().groupby(["epochs", "model"])
    cases = arms[arms.index.get_level_values("size") != REFERENCE].copy()
    if freedom:
        typical = variances.median() * (freedom / 2) / gammaincinv(freedom / 2, 0.5)
        comparisons = len(cases) - len(cases.groupby(CASE))
        quantile = stdtrit(variances.size(), CONFIDENCE ** (1 / comparisons))
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


def decision(findings: Shown) -> str:
    """The sentence that says whether `auto` becomes the default."""
    cases, name = findings.cases, f"`auto`, here {AUTO},"
    auto = cases.xs(AUTO, level="rule")
    if findings.seeds < SEEDS:
        number = "One seed does" if findings.seeds == 1 else f"{findings.seeds} seeds do"
        return f"{number} not decide whether {name} is as good as the best rule."
    worse = auto[auto["ratio"] > auto["limit"]]
    if len(worse):
        worse_cases = "; ".join(
            f"{name_of(case)} ({row.ratio:.2f} × the error)"
            for case, row in zip(worse.index, worse.itertuples(), strict=True)
        )
        everywhere = f"{name} is not as good as the best rule everywhere within its noise"
        return f"{everywhere}: it is worse for {worse_cases}. It does not become the default."
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
    """A table: the loss of each rule to the best rule of a case, in points, and the case of its largest loss."""
    lines = []
    for rule in RULES:
        of_rule = cases.xs(rule, level="rule")
        worst = of_rule["loss"].idxmax()
        worse = "–" if of_rule["limit"].isna().any() else int((of_rule["ratio"] > of_rule["limit"]).sum())
        numbers = [f"{100 * of_rule['loss'].mean():.2f}", f"{100 * of_rule['loss'].max():.2f}"]
        lines.append([rule, *numbers, name_of(worst), len(of_rule), worse])
    return rows(["rule", "mean loss, points", "worst loss, points", "which is of", "cases", "shown to be worse"], lines)


def extent(trained: int, seeds: int, commit: str) -> str:
    """The sentence that says how much of the benchmark a page covers."""
    full = len(trainings([*MODELS], EPOCHS, SIZES, SEEDS))
    kind = "All" if trained == full else "A part of the benchmark:"
    return f"{kind} {trained} trainings of {full}, with {count(seeds, 'seed')}, on one thread each, at commit {commit}."


def page(runs: pd.DataFrame, commit: str) -> str:
    """The tables, the limits of chance, and the decision."""
    findings, seeds = shown(runs), runs["seed"].nunique()
    text = [extent(len(runs), seeds, commit), "Test accuracy in percent, mean ± standard deviation over the seeds.", ""]
    for epochs in sorted(runs["epochs"].unique()):
        text += [f"**After {count(epochs, 'epoch')}**", "", accuracies(findings.arms, epochs), ""]
    limits = findings.cases["limit"]
    text += ["What a rule loses to the best one of its model, epochs and batch size:", "", losses(findings.cases), ""]
    if seeds > 1:
        span = f"{limits.min():.2f} to {limits.max():.2f}"
        text += [f"Shown to be worse is an error of {span} times that of the best rule, by model and epochs."]
    return "\n".join([*text, decision(findings)])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(1, SEEDS + 1), help=f"of {SEEDS}")
    args = parser.parse_args()
    options, folder = ["data.offline=error"], folder_of("bench-lr-scaling", args)
    planned = trainings([*MODELS], EPOCHS, SIZES, args.seeds)
    if args.smallest:
        options, planned = SMALLEST, trainings(["mlp"], [1], [32, REFERENCE], 2)
    folders = [folder / training.path for training in planned]
    commit_of(folders, folder)
    runs = train_all(planned, folder, [f"data.root={args.root}", *options])
    commit = commit_of(folders, folder)
    data = {"commit": commit, "auto": AUTO, "trainings": runs.sort_values(["seed", *CASE, "rule"]).to_dict("records")}
    write_result("lr_scaling", page(runs, commit), data, args)


if __name__ == "__main__":
    exit_on_user_error(main)
