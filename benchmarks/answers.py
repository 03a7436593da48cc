"""Do timed sweeps name the right batch size, also beside other programs? Each answer is compared with other sweeps.

    python benchmarks/answers.py --root ../shared/data                  # 70 minutes
    python benchmarks/answers.py --root ../shared/data --only quiet --repetitions 2

Sweeps as users start them, of two models and two lists of sizes, in four conditions: nothing beside them (quiet); a process
that takes 10 to 20 % of the processor (light); processes that take all of it in bursts of 0.2 to 3 s, half of the time
(bursts); a process that takes a core all the time (steady). Each of these 16 cases is measured five times in a row.

The reference of a sweep is the windows of the four other sweeps of its case, at equal load. So it is independent of the sweep,
was measured in the same minutes, and had the same load: its schedule is that of the case.

Finished sweeps are kept below outputs/bench-answers with their commit, and are not repeated: to measure other code, delete that
folder. A page has sweeps of one commit only, and says how many.
"""

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from harness import ROOT, arguments, folder_of, rows, train, write_result
from simulated import ENOUGH, FIGURES, judge

from batchscope import read_answer
from batchscope.analysis.noise import SEPARATE_RUNS_SD, Rates
from batchscope.analysis.read import read_sweep
from batchscope.analysis.windows import window_table
from batchscope.errors import UserError, exit_on_user_error
from batchscope.files import write_text
from batchscope.records.rates import REPORTED_LOAD

MODELS = ("cnn", "stacked_lstm")
SIZES = ("4,8,16,32,64,128,256,512", "32,64,128,256,512,1024")
REPETITIONS = 5
QUICK = (  # for --smallest: without what has no effect on a rate
    "callbacks.throughput.calibrate=false",
    "callbacks.throughput.record_operations=false",
    "callbacks.device=null",
    "logger.tensorboard=null",
    "callbacks.until_known.seconds=0.3",
)
CONFIDENCE = 0.95  # of the reference's interval
NO_MARGIN = "cannot be judged"  # the reference has no interval

# --- foreign load

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
CONDITIONS = {"quiet": 0, "light": -(-CORES // 5), "bursts": CORES, "steady": 1}  # processes that make the load


def schedule(condition: str, dice: random.Random) -> Iterator[tuple[float, float]]:
    """Yield how many seconds a process of the load is busy, and then how many it is idle."""
    while condition == "steady":
        yield 1.0, 0.0
    while condition == "bursts":
        yield dice.uniform(0.2, 3), dice.uniform(0.2, 3)
    while condition == "light":
        share = dice.uniform(0.1, 0.2) * CORES / CONDITIONS["light"]
        for _ in range(round(share / 0.005)):  # about a second of slices of 5 ms on average
            busy = dice.uniform(0.002, 0.008)
            yield busy, busy / share - busy


@contextlib.contextmanager
def beside(condition: str, seed: str) -> Iterator[None]:
    """Make the load of a condition in processes with the same schedule."""
    load = functools.partial(multiprocessing.Process, target=keep_busy, args=(condition, seed), daemon=True)
    processes = [load() for _ in range(CONDITIONS[condition])]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def keep_busy(condition: str, seed: str) -> None:
    """Follow the schedule by the clock, so that processes with the same seed stay together, until the parent has ended."""
    now, parent = time.monotonic(), multiprocessing.parent_process()
    for busy, idle in schedule(condition, random.Random(seed)):
        while time.monotonic() < now + busy:
            pass
        now += busy + idle
        if parent and not parent.is_alive():
            return
        time.sleep(max(now - time.monotonic(), 0))
        now = max(now, time.monotonic() - 1)  # a starved process catches up on at most a second


# --- sweeps


class Case(NamedTuple):
    """A sweep that is repeated."""

    model: str
    sizes: str
    condition: str

    @property
    def name(self) -> str:
        """`cnn-8-sizes-quiet`."""
        return f"{self.model}-{self.sizes.count(',') + 1}-sizes-{self.condition}"


def sweep(case: Case, folder: Path, options: Sequence[str]) -> float:
    """Run the sweep of a case by the command line, unless it is kept; its wall time."""
    training = ["experiment=throughput", f"model={case.model}", "data=mnist", f"data.batch_size={case.sizes}"]
    return run_sweep(folder, [*training, "trainer.accelerator=cpu", *options], case.condition, case.name)


def run_sweep(folder: Path, words: Sequence[str], condition: str, seed: str = "") -> float:
    """Run a sweep by the command line into a folder, beside the load of a condition, unless it is kept; its wall time."""
    file = facts_file(folder)
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        commit = current_commit()
        with beside(condition, seed):
            started = time.perf_counter()
            assert train(folder, words, sweep=True)
            seconds = time.perf_counter() - started
        write_text(file, json.dumps({"seconds": seconds, "commit": commit}))
    return json.loads(file.read_text())["seconds"]


def facts_file(folder: Path) -> Path:
    """The file beside a sweep's folder that has the seconds and the commit of the finished sweep."""
    return folder.with_name(f"{folder.name}.json")


def current_commit() -> str:
    """The first seven digits of the commit, with `, changed` if the files that a sweep runs differ from it."""
    git = functools.partial(subprocess.run, cwd=ROOT, check=True, capture_output=True, text=True)
    is_dirty = git(["git", "status", "--porcelain", "--", "src", "configs", "train.py"]).stdout
    return git(["git", "rev-parse", "HEAD"]).stdout[:7] + ", changed" * bool(is_dirty)


def commit_of(sweeps: Collection[Path], folder: Path) -> str:
    """The commit of the kept sweeps and, if some are missing, of the sweeps to come.

    Raises:
        UserError: if there are several commits.
    """
    files = [facts_file(path) for path in sweeps]
    commits = {json.loads(file.read_text())["commit"] for file in files if file.exists()}
    commits |= set() if all(file.exists() for file in files) else {current_commit()}
    if len(commits) > 1:
        raise UserError(
            f"{folder}: has or gets sweeps of commits {' and '.join(sorted(commits))}; delete it to start again"
        )
    return commits.pop()


def judged(case: Case, turn: str, folders: Mapping[str, Path]) -> dict[str, Any]:
    """The answer of a sweep, judged by the other sweeps of its case."""
    (answer,) = read_answer(folders[turn])["groups"]
    rates = pooled(folder for other_turn, folder in folders.items() if other_turn != turn)
    chosen, sure = answer["chosen"], answer["sure_share"]
    best = max(rates.settings, key=rates.rate)
    shares = {size: rate / rates.rate(best) for size, rate in rates_of(rates).items()}
    margin = margin_of(rates, chosen) if chosen else math.nan
    labels = {"case": case.name, "condition": case.condition, "turn": turn, "seconds": sweep(case, folders[turn], ())}
    verdict = {key: answer[key] for key in ("chosen", "rule", "passes", "lines")}
    own_rates = pooled([folders[turn]])
    numbers = {"sure": sure, "rates": rates_of(own_rates), "load": load_of(own_rates), "shares": shares}
    numbers |= {"margin": margin if math.isfinite(margin) else None, NO_MARGIN: math.isinf(margin)}
    return labels | verdict | numbers | judge(chosen, sure, shares, margin)


def margin_of(rates: Rates, chosen: int) -> float:
    """The reach of the interval of a size's rate ÷ the best rate of the other sizes; infinite without an interval."""
    best = max((size for size in rates.settings if size != chosen), key=rates.rate)
    return rates.ratio(chosen, best, CONFIDENCE).reach


def load_of(rates: Rates) -> float:
    """The mean share of the processor that other programs took."""
    return float(rates.windows["taken"].mean())


def pooled(folders: Iterable[Path]) -> Rates:
    """The pooled rates of sweeps, whose spread shows how much processes differ."""
    (group,) = read_sweep(folders).groups
    return Rates(window_table(group.sizes), SEPARATE_RUNS_SD, at_equal_load=True)


def rates_of(rates: Rates) -> dict[int, float]:
    """The rate of each size."""
    return {size: rates.rate(size) for size in sorted(rates.settings)}


# --- the page

RATES = """The sizes that were named in each case; the most by which its sweeps differ in the ratio of a size to the largest; and
samples/s of all of them with 90 % intervals:"""


def wanted(sweeps: int) -> str:
    """The sentence with the figures that a number of sweeps should reach."""
    named, near_best, not_too_large = (math.ceil(share * sweeps) for share in (0.95, 0.975, 0.875))
    return (
        f"Wanted of {sweeps} sweeps: {named} named, {near_best} and {not_too_large} with the next two figures, at most "
        f"{math.floor(0.075 * sweeps)} whose sure share is false; and a median of 40 s for quiet sweeps of eight sizes."
    )


def extent(sweeps: int, cases: int, commit: str) -> str:
    """The sentence that says how much of the benchmark a page covers."""
    all_cases = len(MODELS) * len(SIZES) * len(CONDITIONS)
    all_sweeps = all_cases * REPETITIONS
    kind = "All" if (sweeps, cases) == (all_sweeps, all_cases) else "A part of the benchmark:"
    return f"{kind} {sweeps} sweeps of {all_sweeps}, {cases} cases of {all_cases}, at commit {commit}."


def row(name: str, sweeps: pd.DataFrame) -> list[object]:
    """How many sweeps have each figure and each rule, and how long they took."""
    counts = [sweeps[figure].sum() for figure in (*FIGURES, NO_MARGIN)]
    middles = [f"{sweeps[number].astype(float).median():.1%}" for number in ("margin", "load")]
    counts += [(sweeps["rule"] == rule).sum() for rule in ("shown", "best_guess")]
    return [name, len(sweeps), *counts, *middles, f"{sweeps['seconds'].median():.0f}", f"{sweeps['seconds'].max():.0f}"]


def table(key: str, sweeps: pd.DataFrame) -> str:
    """A row for each condition or case, and one for all sweeps."""
    lines = [row(str(name), members) for name, members in sweeps.groupby(key, sort=False)]
    head = [key, "sweeps", *FIGURES, NO_MARGIN, "shown", "best guess", "margin, median", "load, median"]
    head += ["s, median", "s, most"]
    return rows(head, [*lines, row("all", sweeps)])


def numbers_of(sweep: Mapping[str, Any]) -> str:
    """The size that a sweep named, and the right one."""
    shares, chosen = sweep["shares"], sweep["chosen"]
    right = min(size for size, share in shares.items() if share >= ENOUGH)
    line = f"- {sweep['case']}, {sweep['turn']}: {chosen} ({sweep['rule']}), where {right} is right"
    if chosen is None:
        return line
    sure = "no share" if sweep["sure"] is None else f"{sweep['sure']:.3f} of the best rate"
    margin = "unknown" if sweep["margin"] is None else f"{sweep['margin']:.1%}"
    return f"{line}; {sure} for sure, of {shares[chosen]:.3f} ± {margin}"


def not_quiet(sweeps: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line on the quiet sweeps that had a load; none if there are none."""
    loaded = [sweep for sweep in sweeps if sweep["condition"] == "quiet" and sweep["load"] >= REPORTED_LOAD]
    named = ", ".join(f"{sweep['case']} {sweep['turn']} ({sweep['load']:.0%})" for sweep in loaded)
    return [f"Not quiet, although nothing was started beside them: {named}."] if loaded else []


def case_words(name: str, rates: Rates, sweeps: Sequence[Mapping[str, Any]]) -> str:
    """The sizes that the sweeps of a case named, by how much the sweeps differ, and their pooled rates."""
    values = ", ".join(f"{size}: {rates.rate(size):,.0f} ± {rates.reach(size):.1%}" for size in sorted(rates.settings))
    named = ", ".join(str(sweep["chosen"]) for sweep in sweeps)
    to_largest = pd.DataFrame([sweep["rates"] for sweep in sweeps]).apply(lambda rates: rates / rates.iloc[-1], axis=1)
    differ = (to_largest.max() / to_largest.min()).max() - 1
    return f"- {name}: {named}; {differ:.1%}; {values}"


def page(sweeps: Sequence[Mapping[str, Any]], reference: Mapping[str, Rates], commit: str) -> str:
    """The tables, each sweep with a wrong figure, and the rates."""
    numbers = pd.DataFrame(sweeps)
    quiet = numbers["seconds"][numbers["case"].str.endswith("-8-sizes-quiet")]
    wrong = [numbers_of(sweep) for sweep in sweeps if sweep[NO_MARGIN] or any(sweep[f] != FIGURES[f] for f in FIGURES)]
    text = [extent(len(sweeps), len(reference), commit), "", table("condition", numbers), "", table("case", numbers)]
    text += ["", wanted(len(sweeps))]
    text += [f"Quiet sweeps of eight sizes took {quiet.median():.0f} s (median)."] if len(quiet) else []
    text += not_quiet(sweeps)
    text += ["", "Not as it should be:", "", *wrong, "", RATES, ""]
    text += [case_words(name, rates, [s for s in sweeps if s["case"] == name]) for name, rates in reference.items()]
    return "\n".join(text)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=CONDITIONS, default=[*CONDITIONS], help="measure and judge these alone"
    )
    parser.add_argument(
        "--repetitions", type=int, default=REPETITIONS, help=f"sweeps of each case, at least 2 ({REPETITIONS})"
    )
    args = parser.parse_args()
    if args.repetitions < 2:
        raise UserError(
            f"--repetitions: got {args.repetitions}, takes 2 or more: a sweep is judged by the others of its case"
        )
    cases = [Case(model, sizes, condition) for condition in args.only for sizes in SIZES for model in MODELS]
    if args.smallest:
        cases, args.repetitions = [Case("mlp", "16,256", "light")], 2
    turns = [str(number) for number in range(args.repetitions)]
    out = folder_of("bench-answers", args)
    folders = {case: {turn: out / case.name / turn for turn in turns} for case in cases}
    all_folders = [folder for of_case in folders.values() for folder in of_case.values()]
    commit_of(all_folders, out)
    for case, turn in itertools.product(cases, turns):
        options = QUICK if args.smallest else ()
        seconds = sweep(case, folders[case][turn], [f"data.root={args.root}", *options])
        print(f"{case.name}, {turn}: {seconds:.0f} s", flush=True)
    commit = commit_of(all_folders, out)
    sweeps = [judged(case, turn, folders[case]) for case in cases for turn in turns]
    reference = {case.name: pooled(folders[case].values()) for case in cases}
    pooled_rates = {name: rates_of(rates) for name, rates in reference.items()}
    data = {"commit": commit, "reference": pooled_rates, "sweeps": sweeps}
    write_result("answers", page(sweeps, reference, commit), data, args)


if __name__ == "__main__":
    exit_on_user_error(main)
