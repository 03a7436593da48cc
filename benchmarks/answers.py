"""Are the sentences true that sweeps print? Each is held against a longer measurement on a quiet machine.

    python benchmarks/answers.py --root ../shared/data                  # about 90 minutes

First two long sweeps of each model on a quiet machine, which are pooled: the reference. Then timed sweeps as users start
them, in three conditions that take turns: nothing beside them; a process that takes 10 to 20 % of the processor; processes
that take all of it in bursts of 0.2 to 3 s, half of the time. Each claim of an answer is judged by the reference. The
table also says how long sweeps take, and how much of that is not training.

What has been measured is kept below outputs/bench-answers, and not measured again. The report of one quiet sweep of each
model goes to results/sweep.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, arguments, folder_of, machine, median, rows, train, write_result
from simulated import Reference, why_false

from batchscope.analysis import write_report
from batchscope.analysis.answer import answer
from batchscope.analysis.read import find
from batchscope.records.read import FILE, read

CONDITIONS = ("quiet", "light", "bursts")
CASES = {"cnn": "2,8,32,256", "stacked_lstm": "2,8,32,256"}  # model → batch sizes
SWEEPS = 20  # in each condition
LONG = ("callbacks.until_known.seconds=25", "callbacks.until_known.precision=0.005")
QUICK = (  # leaves out what has no part in a rate, for --smallest
    "callbacks.throughput.calibrate=false",
    "callbacks.throughput.record_operations=false",
    "callbacks.device=null",
    "callbacks.memory=null",
    "logger.tensorboard=null",
    "callbacks.until_known.seconds=0.3",
)
Schedule = Iterator[tuple[float, float]]  # seconds busy, then seconds idle

# --- foreign load


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def light(seed: int) -> Schedule:
    """Busy for 10 to 20 % of the machine in slices of 2 to 8 ms, another share each second."""
    dice, processes = random.Random(seed), processes_of("light")
    while True:
        share, spent = dice.uniform(0.1, 0.2) * cores() / processes, 0.0
        while spent < 1:
            busy = dice.uniform(0.002, 0.008)
            spent += busy / share
            yield busy, busy / share - busy


def bursts(seed: int) -> Schedule:
    """Busy in bursts of 0.2 to 3 s, half of the time."""
    dice = random.Random(seed)
    while True:
        yield dice.uniform(0.2, 3), dice.uniform(0.2, 3)


def processes_of(condition: str) -> int:
    """How many processes make the load: a light one needs a fifth of the cores, a burst takes all."""
    return {"quiet": 0, "light": -(-cores() // 5), "bursts": cores()}[condition]


@contextlib.contextmanager
def beside(condition: str, seed: int) -> Iterator[None]:
    """Make the load of a condition; the processes of `bursts` have the same bursts."""
    seeds = [seed if condition == "bursts" else 1000 * seed + n for n in range(processes_of(condition))]
    started = [multiprocessing.Process(target=load, args=(condition, each), daemon=True) for each in seeds]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def load(condition: str, seed: int) -> None:
    """Follow the schedule by the clock, so that processes with the same seed stay together, until the parent has ended."""
    now, parent = time.monotonic(), multiprocessing.parent_process()
    for busy, idle in {"light": light, "bursts": bursts}[condition](seed):
        while time.monotonic() < now + busy:
            pass
        now += busy + idle
        if parent and not parent.is_alive():
            return
        time.sleep(max(now - time.monotonic(), 0))
        now = max(now, time.monotonic() - 1)  # one that was starved does not make up for more than a second


# --- sweeps


def sweep(place: Path, options: Sequence[str], condition: str = "quiet", seed: int = 0) -> dict[str, Any]:
    """Do a sweep by the command line, beside some load; its wall time. One that was done before is not done again."""
    file = place.with_name(f"{place.name}.json")
    if file.exists():
        return json.loads(file.read_text())
    shutil.rmtree(place, ignore_errors=True)
    with beside(condition, seed):
        started = time.perf_counter()
        assert train(place, options, sweep=True)
        seconds = time.perf_counter() - started
    records = [read(path.parent) for path in place.rglob(FILE)]
    training = sum(record["throughput"]["fit_seconds"] for record in records if record.get("throughput"))
    found = {"seconds": seconds, "training": training, "runs": len(records), "measured": machine()}
    file.with_suffix(".tmp").write_text(json.dumps(found))
    file.with_suffix(".tmp").replace(file)
    return found


def options_of(model: str, sizes: str, args: argparse.Namespace) -> list[str]:
    """The options of a timed sweep."""
    options = ["experiment=throughput", f"model={model}", "data=mnist", f"data.root={args.root}"]
    return [*options, f"data.batch_size={sizes}", "trainer.accelerator=cpu", *(QUICK if args.smallest else ())]


def references(cases: Mapping[str, str], out: Path, args: argparse.Namespace) -> tuple[dict[str, Reference], str]:
    """By model the pooled rates of its long sweeps, and what the page says of them."""
    found, text = {}, ""
    for model, sizes in cases.items():
        places = [out / "reference" / f"{model}-{number}" for number in range(1 if args.smallest else 2)]
        for place in places:
            sweep(place, [*options_of(model, sizes, args), *(() if args.smallest else LONG)])
        rates = find(places).groups[0].rates
        off = {size: rates.reach(size) for size in sorted(rates.settings)}
        found[model] = Reference({size: rates.rate(size) for size in off}, off)
        known = ", ".join(f"{size}: {rates.rate(size):,.0f} ± {off[size]:.1%}" for size in off)
        one, other = (find([place]).groups[0].rates for place in (places[0], places[-1]))
        largest = max(off)
        most = max(abs(one.ratio(size, largest).value / other.ratio(size, largest).value - 1) for size in off)
        text += f"\n\nReference of {model}, samples/s: {known}. "
        text += f"The two sweeps differed by at most {most:.1%} (of ratios to the largest size)."
    return found, text


def judged(place: Path, truth: Reference) -> dict[str, Any]:
    """The answer of a sweep's folder, held against the reference."""
    group = find([place]).groups[0]
    found = answer(group)
    assert found is not None
    return {
        "size": found.size,
        "of_best": truth.of_best(found.size) if found.size else None,
        "busy": found.rates.busy,
        "lines": found.lines,
        "claims": found.claims,
        "false": [why for claim in found.claims if (why := why_false(claim, truth))],
        "reach": {size: found.rates.reach(size) for size in group.sizes},
    }


def table_of_sweeps(sweeps: list[dict[str, Any]]) -> str:
    """A line for each condition, and one for each false claim."""
    lines = []
    for condition in dict.fromkeys(one["condition"] for one in sweeps):
        of = [one for one in sweeps if one["condition"] == condition]
        decided = [one for one in of if one["size"]]
        least = f"{min(one['of_best'] for one in decided):.2f}" if decided else "–"
        seconds, wrong = [one["seconds"] for one in of], sum(bool(one["false"]) for one in of)
        beyond = median([(one["seconds"] - one["training"]) / one["runs"] for one in of])
        cells = [condition, len(of), len(decided), wrong, least, f"{median(seconds):.0f}", f"{max(seconds):.0f}"]
        lines.append([*cells, f"{beyond:.1f}"])
    head = ["beside the sweep", "sweeps", "decided", "with a false claim", "recommended ÷ best, least", "s, median"]
    text = [rows([*head, "s, most", "no training, s a run"], lines), ""]
    text += ["Wanted: at most 1 sweep of 60 with a false claim, 18 of 20 quiet ones decided, 0.88 of the best rate."]
    return "\n".join([*text, *(f"- {one['name']}: {why}" for one in sweeps for why in one["false"])])


def main() -> None:
    args = arguments(__doc__).parse_args()
    cases, conditions, repetitions = CASES, CONDITIONS, SWEEPS
    if args.smallest:
        cases, conditions, repetitions = {"mlp": "16,256"}, ("light",), 1
    out, models, sweeps = folder_of("bench-answers", args), list(cases), []
    truths, said = references(cases, out, args)
    for repetition in range(repetitions):
        model = models[repetition % len(models)]
        for condition in conditions:
            name = f"{model}-{condition}-{repetition}"
            facts = sweep(out / "sweeps" / name, options_of(model, cases[model], args), condition, repetition)
            about = {"name": name, "model": model, "condition": condition}
            sweeps.append(about | facts | judged(out / "sweeps" / name, truths[model]))
            print(name, *sweeps[-1]["lines"], sep="\n", flush=True)
    text = table_of_sweeps(sweeps) + said
    facts = {model: {"rates": truth.rates, "off": truth.off} for model, truth in truths.items()}
    write_result("answers", text, {"reference": facts, "sweeps": sweeps}, args)
    if not args.smallest:
        quiet = {one["model"]: out / "sweeps" / one["name"] for one in sweeps if one["condition"] == "quiet"}
        shutil.rmtree(RESULTS / "sweep", ignore_errors=True)
        write_report(quiet.values(), RESULTS / "sweep")
        for page in [*(RESULTS / "sweep").glob("*.html"), RESULTS / "sweep" / "tensorboard"]:
            shutil.rmtree(page) if page.is_dir() else page.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
