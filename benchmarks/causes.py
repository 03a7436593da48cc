"""Causes that are built in on purpose, and the verdict that a run of each gets.

    python benchmarks/causes.py
    python benchmarks/causes.py --only "60 tiny layers" --threads 2

Each case of `built_in/cases.py` runs in a process of its own, with ThroughputMonitor as any Lightning project has it. All
processes use one calibration for each number of threads, measured before the first case. The process then checks the
cause without batchscope. A case whose check fails on this machine is marked, and counts as the others do.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import tempfile
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from built_in.case import Case
from built_in.cases import CASES
from built_in.on_gpu import gpu_cases
from built_in.verdicts import contradictions, is_right
from harness import RESULTS, machine, write_result

PATIENCE_S = 600
LEAST_OF_ROOF = 0.3  # a cause by FLOPs or bytes reaches this part of the rate of a plain operation
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="NAME", help="cases to run; results are printed only"
    )
    parser.add_argument("--update", action="store_true", help="with --only: replace these cases in the last results")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1, help="runs of each case")
    parser.add_argument("--steps", type=int, default=100, help="of a run, which ends after 10 s at the latest")
    parser.add_argument("--check-rounds", type=int, default=3, help="of the check of each cause; 0: none")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name}: {' or '.join(case.expected)}. {case.why}" for name, case in CASES.items()))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    turns = [(name, threads) for name in args.only or CASES for threads in args.threads]
    last = json.loads((RESULTS / "causes.json").read_text())["results"] if args.update else []
    results: dict[tuple[str, int], list[Result]] = {(each["case"], each["threads"]): each["runs"] for each in last}
    results |= {turn: [] for turn in turns}
    with tempfile.TemporaryDirectory() as folder:
        disturbed = {threads: in_a_process("", threads, 0, 0, folder).get("disturbed") for threads in args.threads}
        for round_ in range(args.rounds):
            order = random.Random(round_).sample(turns, len(turns)) if args.rounds > 1 else turns
            for name, threads in order:
                checks = args.check_rounds if round_ == 0 else 0
                found = in_a_process(name, threads, args.steps, checks, folder)
                results[name, threads].append(judge(CASES[name], found))
                print(f"{name}, {threads} threads: {in_words(results[name, threads][-1])}", flush=True)
    text = "\n\n".join([table(results), *conclusions(results, disturbed)])
    if args.only and not args.update:
        print(f"\n{text}\n\n{machine()}")
    else:
        data = [{"case": name, "threads": threads, "runs": runs} for (name, threads), runs in results.items()]
        write_result("causes", text, {"results": data, "disturbed": disturbed, "machine": machine()})


def in_a_process(name: str, threads: int, steps: int, checks: int, folder: str, device: str = "cpu") -> Result:
    """A case; without a name the calibration, which goes to a cache of this comparison's own."""
    server = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")  # CUDA does not survive a fork
    server.set_forkserver_preload(["lightning", "torchvision", "batchscope.callbacks.throughput"])
    with ProcessPoolExecutor(1, server, silence, (folder, threads)) as pool:
        try:
            return pool.submit(in_this_process, name, steps, checks, device).result(PATIENCE_S)
        except TimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            return {"error": f"takes more than {PATIENCE_S} s"}
        except Exception as error:  # noqa: BLE001 - a case that fails is a result
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def silence(folder: str, threads: int) -> None:
    """Begin a process: it prints nothing, and its files go to the folder."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.chdir(folder)
    os.environ |= {"XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)


def in_this_process(name: str, steps: int, check_rounds: int, device: str = "cpu") -> Result:
    if name:
        from built_in.child import run

        return run((CASES if device == "cpu" else gpu_cases(device))[name], steps, check_rounds, device)
    from batchscope.hardware.measure import load_or_measure, store

    found = load_or_measure(torch.device(device))
    store(dataclasses.replace(found, disturbed=None))  # the same for all cases, also on a machine that others use
    return {"disturbed": found.disturbed}


def judge(case: Case, found: Result) -> Result:
    """Add to a run's result whether the verdict is right, what contradicts it, and which checks of the cause fail."""
    summary, checks = found.get("summary", {}), found.get("checks", {})
    verdict = summary.get("bottleneck")
    against = contradictions(verdict, summary, found.get("bandwidth"), case.bytes) if summary else []
    failed = [name for name, ratio in checks.items() if not holds(case, name, ratio)]
    judged = {"verdict": verdict, "right": is_right(case.expected, verdict), "contradictions": against}
    return found | judged | {"failed_checks": failed}


def holds(case: Case, name: str, ratio: float) -> bool:
    if name == "ablation":
        assert case.ablation is not None
        return case.ablation.least <= ratio <= case.ablation.most
    return ratio >= LEAST_OF_ROOF


def in_words(run: Result) -> str:
    if "error" in run:
        return f"failed: {run['error']}"
    verdict = run["verdict"]
    if not verdict:
        return "no verdict"
    sure = f", {verdict['certainty']}" if "certainty" in verdict else ""
    share = f" {verdict['share']:.0%}" if verdict.get("share") is not None else ""
    return f"{verdict['kind']}{share}{sure}"


def check_in_words(case: Case, run: Result) -> str:
    words = []
    for name, ratio in run.get("checks", {}).items():
        what = f"{case.ablation.what}: × {ratio:.2f}" if name == "ablation" and case.ablation else f"{ratio:.0%} {name}"
        words.append(what + (" (**fails**)" if name in run["failed_checks"] else ""))
    return "; ".join(words)


def table(results: Mapping[tuple[str, int], list[Result]], cases: Mapping[str, Case] = CASES) -> str:
    lines = ["| case | threads | expected | verdict | right | evidence | check of the cause |"]
    lines.append("| --- | ---: | --- | --- | ---: | --- | --- |")
    for (name, threads), runs in results.items():
        case, verdicts = cases[name], [in_words(run) for run in runs]
        said = "; ".join(dict.fromkeys(verdicts))
        right = "yes" if all(run["right"] for run in runs) else f"**{sum(run['right'] for run in runs)}/{len(runs)}**"
        evidence = evidence_of(runs[0])
        cells = [name, str(threads), " or ".join(case.expected), said, right, evidence, check_in_words(case, runs[0])]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def evidence_of(run: Result) -> str:
    verdict = run["verdict"] or {}
    against = f" **contradicted: {'; '.join(run['contradictions'])}**" if run["contradictions"] else ""
    return str(verdict.get("evidence", verdict.get("advice", ""))) + against


def conclusions(results: Mapping[tuple[str, int], list[Result]], disturbed: Mapping[int, str | None]) -> list[str]:
    runs = [run for found in results.values() for run in found]
    right = sum(run["right"] for run in runs)
    lines = [
        f"{right} of {len(runs)} verdicts are right: {right / len(runs):.0%} ({len(results)} cases and thread counts)."
    ]
    one_kind = [run for (name, _), found in results.items() if len(CASES[name].expected) == 1 for run in found]
    if one_kind and len(one_kind) < len(runs):
        single = sum(run["right"] for run in one_kind)
        lines.append(f"Without the mixed cases {single} of {len(one_kind)}: {single / len(one_kind):.0%}.")
    against = [
        f"{name} ({threads})" for (name, threads), found in results.items() if any(r["contradictions"] for r in found)
    ]
    lines.append(f"Contradicted by their own numbers: {', '.join(against) or 'none'}.")
    unsure = [
        f"{name} ({threads})" for (name, threads), found in results.items() if any(r["failed_checks"] for r in found)
    ]
    lines.append(f"Causes whose check fails on this machine: {', '.join(unsure) or 'none'}.")
    lines += [f"The calibration with {threads} threads: {found}." for threads, found in disturbed.items() if found]
    return lines


if __name__ == "__main__":
    main()
