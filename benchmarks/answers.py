"""Are the sentences true that sweeps print? Each is held against a longer measurement on a quiet machine.

    python benchmarks/answers.py --root ../shared/data                  # about 90 minutes

First two long sweeps of each model on a quiet machine, which are pooled: the reference. Then timed sweeps as users start
them, in three conditions that take turns: nothing beside them; a process that takes 10 to 20 % of the processor; processes
that take all of it in bursts of 0.2 to 3 s, half of the time. Each claim of an answer is judged by the reference. The
table also says how long sweeps take, and how much of that is not training.

What has been measured is kept in --out, and not measured again. The report of one quiet sweep of each model goes to
results/sweep.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, arguments, machine, median, rows, sweep_line, write_result
from simulated import Reference, why_false

from batchscope.analysis import write_report
from batchscope.analysis.answer import answer
from batchscope.analysis.groups import Group
from batchscope.analysis.read import find
from batchscope.records.read import FILE, read

CONDITIONS = ("quiet", "light", "bursts")
CASES = ("cnn=2,8,32,256", "stacked_lstm=2,8,32,256")
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

# --- foreign load: processes of this file, which end when their parent has ended


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
    """Make the load of a condition; those of `bursts` have the same bursts."""
    seeds = [seed if condition == "bursts" else 1000 * seed + n for n in range(processes_of(condition))]
    line = [sys.executable, __file__, "--load", condition, str(os.getpid())]
    started = [subprocess.Popen([*line, str(each)]) for each in seeds]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def load(condition: str, parent: str, seed: str) -> None:
    """Follow the schedule by the clock, so that processes with the same seed stay together."""
    now = time.monotonic()
    for busy, idle in {"light": light, "bursts": bursts}[condition](int(seed)):
        while time.monotonic() < now + busy:
            pass
        now += busy + idle
        if os.getppid() != int(parent):
            return
        time.sleep(max(now - time.monotonic(), 0))
        now = max(now, time.monotonic() - 1)  # one that was starved does not make up for more than a second


# --- sweeps


def sweep(place: Path, options: Sequence[str], condition: str = "quiet", seed: int = 0) -> dict[str, Any]:
    """Do a sweep by the command line, beside some load; its wall time."""
    shutil.rmtree(place, ignore_errors=True)
    with beside(condition, seed):
        started = time.perf_counter()
        done = subprocess.run(sweep_line(place, options), cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    records = [read(path.parent) for path in place.rglob(FILE)]
    training = sum(record["throughput"]["fit_seconds"] for record in records if record.get("throughput"))
    return {
        "seconds": seconds,
        "training": training,
        "runs": len(records),
        "condition": condition,
        "measured": machine(),
    }


def kept(place: Path, do: Callable[[], Any]) -> Any:
    """What was found when it was done before; a sweep that was killed is done again."""
    file = place.with_name(f"{place.name}.json")
    if not file.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        found = do()
        file.with_suffix(".tmp").write_text(json.dumps(found))
        file.with_suffix(".tmp").replace(file)
    return json.loads(file.read_text())


def options_of(case: str, args: argparse.Namespace) -> list[str]:
    """`cnn=8,64` → the options of its timed sweep."""
    model, _, sizes = case.partition("=")
    options = ["experiment=throughput", f"model={model}", "data=mnist", f"data.root={Path(args.root).resolve()}"]
    return [*options, f"data.batch_size={sizes}", "trainer.accelerator=cpu", *(QUICK if args.smallest else ())]


def reference_of(places: Sequence[Path]) -> Reference:
    """The pooled rates of long sweeps."""
    rates = find(places).groups[0].rates
    off = {size: rates.reach(size) for size in rates.settings}
    return Reference({size: rates.rate(size) for size in sorted(rates.settings)}, off)


def judged(place: Path, truth: Reference) -> dict[str, Any]:
    """The answer of a sweep's folder, held against the reference."""
    group: Group = find([place]).groups[0]
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


def measure_references(args: argparse.Namespace) -> dict[str, list[Path]]:
    """The folders of the long sweeps of each case."""
    places: dict[str, list[Path]] = {}
    for number in range(1 if args.smallest else 2):
        for case in args.cases:
            place = args.out / "reference" / f"{case.partition('=')[0]}-{number}"
            options = [*options_of(case, args), *(() if args.smallest else LONG)]
            kept(place, lambda p=place, o=options: sweep(p, o))
            places.setdefault(case, []).append(place)
            print(f"\rreference: {sum(map(len, places.values()))}", end="", flush=True)
    print()
    return places


def measure_sweeps(args: argparse.Namespace, references: Mapping[str, Reference]) -> list[dict[str, Any]]:
    """All sweeps, in conditions and models that take turns, each with its judgement; those beside bursts come last."""
    conditions = CONDITIONS[1:2] if args.smallest else CONDITIONS
    order = [(n, c) for n in range(args.sweeps) for c in conditions[:2]]
    order += [(n, c) for c in conditions[2:] for n in range(args.sweeps)]
    found = []
    for number, (repetition, condition) in enumerate(order):
        case = args.cases[repetition % len(args.cases)]
        place = args.out / "sweeps" / str(number)
        options = options_of(case, args)
        facts = kept(place, lambda p=place, o=options, c=condition, n=number: sweep(p, o, c, n))
        found.append({"number": number, "case": case, **facts, **judged(place, references[case])})
        print(f"\rsweeps: {number + 1} of {args.sweeps * len(conditions)}", end="", flush=True)
    print()
    return found


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
    return "\n".join([*text, *(f"- sweep {n}: {why}" for n, one in enumerate(sweeps) for why in one["false"])])


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        load(*sys.argv[2:])
        return
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL=SIZES")
    parser.add_argument("--sweeps", type=int, default=20, help="in each condition")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench-answers")
    args = parser.parse_args()
    if args.smallest:
        args.cases, args.sweeps, args.out = ["mlp=16,256"], 1, args.out.with_name("bench-answers-smallest")
        shutil.rmtree(args.out, ignore_errors=True)
    args.out = args.out.resolve()
    places = measure_references(args)
    references = {case: reference_of(of_case) for case, of_case in places.items()}
    sweeps = measure_sweeps(args, references)
    text = table_of_sweeps(sweeps)
    for case, truth in references.items():
        known = ", ".join(f"{size}: {rate:,.0f} ± {truth.off[size]:.1%}" for size, rate in truth.rates.items())
        text += f"\n\nReference of {case.partition('=')[0]}, samples/s: {known}."
    facts = {case: {"rates": truth.rates, "off": truth.off} for case, truth in references.items()}
    write_result("answers", text, {"reference": facts, "sweeps": sweeps}, args)
    if not args.smallest:
        quiet = {one["case"]: args.out / "sweeps" / str(one["number"]) for one in sweeps if one["condition"] == "quiet"}
        shutil.rmtree(RESULTS / "sweep", ignore_errors=True)
        write_report(quiet.values(), RESULTS / "sweep")
        for page in [*(RESULTS / "sweep").glob("*.html"), RESULTS / "sweep" / "tensorboard"]:
            shutil.rmtree(page) if page.is_dir() else page.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
