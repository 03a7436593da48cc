"""The parts of answers.py beside sweeps: simulated sweeps, `compare`, and simulated diagnoses."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from batchscope.analysis.answer import answer
from batchscope.analysis.compare import compare
from batchscope.analysis.diagnose import AGAIN, BASELINE, CHANGE, find_findings
from batchscope.analysis.read import find

from . import simulated
from .claims import Reference, why_false
from .simulated import METRIC, Noise, Truth

SIZES = (8, 32, 64, 128, 256, 512)
SLOWER = 0.3  # built into `compare`'s slower side
_FASTER = 1.4  # the change that helps


def random_noise(rng: np.random.Generator) -> Noise:
    """Noise as machines have it: from nearly none to bursts half of the time."""
    busy = float(rng.choice([0, 0, 0, 0.2, 0.5]))
    return Noise(
        window=rng.uniform(0.02, 0.15),
        alike=rng.uniform(0, 0.6),
        drift=rng.uniform(0, 0.05),
        busy=busy,
        uneven=bool(rng.random() < 0.5),
        seen=bool(rng.random() < 0.7),
    )


def simulated_sweep(place: Path, number: int) -> dict[str, Any]:
    """Write a sweep of known truth, and judge its answer: every other one has three seeds."""
    rng = np.random.default_rng(number)
    seeds = 1 + 2 * (number % 2)
    kind = ("rising", "near", "equal")[number % 3]
    truth = Truth(
        rates=simulated.random_rates(kind, SIZES, rng),
        accuracies=simulated.random_accuracies(SIZES, rng),
        samples=int(rng.choice([1_000, 5_000, 10_000])),
        seed_noise=rng.uniform(0, 0.004),
    )
    runs = simulated.simulate(truth, random_noise(rng), int(rng.integers(10, 60)) // seeds + 4, rng, seeds=seeds)
    shutil.rmtree(place, ignore_errors=True)
    simulated.write(place, runs)
    found = answer(find([place]).groups[0], [METRIC])
    assert found is not None
    truth_of = Reference(truth.rates, metrics=truth.accuracies)
    wrong = [why for claim in found.claims if (why := why_false(claim, truth_of))]
    return {
        "size": found.size,
        "lines": found.lines,
        "claims": found.claims,
        "false": wrong,
        "kind": kind,
        "seeds": seeds,
    }


def simulated_diagnosis(place: Path, number: int) -> dict[str, Any]:
    """A diagnosis of four changes; the first of every other one helps. Says which change is recommended."""
    rng = np.random.default_rng(10_000 + number)
    roles = [(BASELINE, []), *((CHANGE, [f"data.num_workers={n}"]) for n in range(1, 5)), (AGAIN, [])]
    helps = number % 2 == 1
    rates = {n + 1: 1e4 * (_FASTER if helps and n == 1 else 1.0) for n in range(len(roles))}
    noise = Noise(window=rng.uniform(0.03, 0.12), alike=rng.uniform(0, 0.4), drift=rng.uniform(0, 0.02), mood=0.02)
    runs = simulated.simulate(Truth(rates), noise, 30, rng, shared=number % 4 < 2)
    for minute, (run, (role, options)) in enumerate(zip(runs, roles, strict=True)):
        _as_batch_size(run.record, 64)
        run.record.update(diagnosis={"role": role, "options": options}, overrides=options)
        run.record["started"] = f"2026-01-01T00:{minute:02}:00+00:00"
        run.record["config"]["data"]["num_workers"] = minute
    shutil.rmtree(place, ignore_errors=True)
    simulated.write(place, runs)
    best = find_findings(place).best
    options = list(best.options) if best else None
    false = options is not None and (not helps or options != roles[1][1])
    return {"recommended": options, "helps": helps, "false": [f"recommends {options}"] if false else []}


def _as_batch_size(record: dict[str, Any], size: int) -> None:
    """The same rate and steps, called another batch size: the runs of a diagnosis have the same."""
    record["config"]["data"]["batch_size"] = record["throughput"]["batch_size"] = size


def compare_pairs(
    out: Path, root: str, pairs: int, rounds: int, seconds: float, kept: Callable[[Path, Callable[[], Any]], Any]
) -> list[dict[str, Any]]:
    """A against A, and A against a slower one: in pairs, as `--rerun` runs them, and every other pair apart."""
    import compare as script  # benchmarks/compare.py, which has the built-in slowdown

    from batchscope.sweep import fork_server
    from batchscope.sweep.loop import Loop
    from batchscope.sweep.rerun import a_b

    os.environ["PYTHONPATH"], fork_server.JOB = str(Path(script.__file__).parent), "slowed_job"
    words = [f"data.root={Path(root).resolve()}"]
    found = []
    with fork_server.forking() as server:
        loop = Loop(server)

        def measure(place: Path, share: float, in_pairs: bool) -> dict[str, Any]:
            shutil.rmtree(place, ignore_errors=True)
            both = [script.side("a", words), script.side("b", words, share)]
            if in_pairs:
                loop.run(a_b({"": both}, place, rounds, seconds))
            else:
                for side in both:
                    loop.run(a_b({"": [side]}, place, 1, rounds * seconds))
            return {"slower": share, "in_turns": in_pairs}

        for number in range(pairs):
            for name, share in (("unchanged", 0.0), ("slower", SLOWER)):
                place = out / f"{name}-{number}"
                facts = kept(place, lambda p=place, s=share, n=number: measure(p, s, n % 2 == 0))
                found.append(facts | _judged_pair(place, share))
                print(f"\rcompare: {len(found)} of {2 * pairs}", end="", flush=True)
    print()
    return found


def _judged_pair(place: Path, share: float) -> dict[str, Any]:
    """What `compare` says of a pair, and whether it is false: a winner among equals, or the slower one."""
    found = compare(place / "a", place / "b").compared[0]
    said, ratio = found.verdict, found.slowdown
    wrong = said == "faster" or (said == "slower" and not share)
    false = [f"B is {said}, ratio {ratio.value:.3f}"] if wrong else []
    return {"ratio": [ratio.low, ratio.value, ratio.high], "said": said, "busy": found.busy, "false": false}


def kept(place: Path, do: Callable[[], Any]) -> Any:
    """What was found when it was done before; a part that was killed is done again."""
    file = place.with_name(f"{place.name}.json")
    if file.exists():
        return json.loads(file.read_text())
    place.parent.mkdir(parents=True, exist_ok=True)
    found = do()
    written = file.with_suffix(".tmp")
    written.write_text(json.dumps(found))
    written.replace(file)
    return found
