"""The smallest case of each script in benchmarks/ runs, and writes no result."""

import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscope.analysis.noise import Rates
from batchscope.errors import UserError
from batchscope.sweep.visits import MAX_AT_ONCE
from tests.support.waiting import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KERNELS = BENCHMARKS.parents[1] / "shared" / "data" / "gpu_kernels"
LINES = {  # command line → what is printed
    "speed.py pipelines": "| bare tensor indexing |",
    "speed.py memory": "| 8 |",
    "speed.py epoch": "| a tuned loop |",
    "speed.py start": "| torch._dynamo |",
    "monitoring.py": "**SimpleCNN, batch 8**",
    "truth.py": "Worst deviation",
    "causes.py": "| sleep in training_step | 1 | host |",
    "causes.py --device cuda --list": "large batches from pageable memory: transfer",
    "roofline.py": "| 1 | the peak: FLOP/s |",
    "recurrent.py": "| LSTM | 5, 4, 8, 2, 3 |",
    "zoo.py accuracy": "| MLP | rendered-digits |",
    "zoo.py sequences --list": "adding-400-stacked_lstm",
    "answers.py": "| light | 2 |",
    "trained.py": "Of 1 sweeps: 1 named",
    "simulated.py": "| quiet, eight sizes |",
    "compare.py": "| unchanged, side by side | 2 |",
    "diagnose.py": "| that do nothing | 2 |",
    "choose.py": "**cnn**",
    "cuda_trace.py": "",
    "reliability.py": "are bit-identical",
    "scaling.py": "| cnn | 1.69 MB |",
    "time_to_target.py": "| mlp on digits | val/acc 40 % |",
    "lr_scaling.py": "| mlp | 128 |",
    "coffee.py": "seeds have 99%",
}


@pytest.fixture
def unwritten() -> Iterator[None]:
    """Nothing is written to results/."""
    files = [path for path in (BENCHMARKS / "results").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    yield
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_the_smallest_case_runs(line: str, unwritten: None, mnist_files: Path):
    script, *words = line.split()
    command = [sys.executable, str(BENCHMARKS / script), *words, "--smallest", "--root", str(mnist_files)]
    done = subprocess.run(
        command, cwd=BENCHMARKS.parent, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert LINES[line] in done.stdout, done.stdout


def test_every_script_has_a_smallest_case():
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - {"harness.py", "mutations.py"}
    assert scripts == {line.split()[0] for line in LINES}


@pytest.mark.parametrize(
    ("chosen", "sure", "margin", "figures"),
    [
        (32, 0.87, 0.0, [True, True, True, False, False]),
        (16, 0.80, 0.0, [True, False, True, True, False]),  # too slow
        (16, 0.80, 0.1, [True, False, True, False, False]),  # perhaps not
        (128, 0.99, 0.0, [True, True, False, False, False]),  # two doublings above 32
        (32, 0.93, 0.0, [True, True, True, False, True]),
        (16, None, 0.0, [True, False, True, True, True]),  # says nothing of its share: enough is claimed
        (32, 0.93, 0.03, [True, True, True, False, False]),  # the reference may be off by as much
        (None, 0.0, 0.0, [False] * 5),
    ],
)
def test_an_answer_is_judged_by_the_true_shares(chosen, sure, margin, figures, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    judge = runpy.run_path(str(BENCHMARKS / "simulated.py"))["judge"]
    shares = {16: 0.82, 32: 0.92, 64: 0.97, 128: 1.0}
    assert list(judge(chosen, sure, shares, margin).values()) == figures


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What simulated.py defines."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "simulated.py"))


def test_some_simulated_rates_fall_after_a_peak(simulated: dict[str, Any]):
    sizes = [4 * 2**n for n in range(8)]
    curves = simulated["Scenario"]("").curves
    assert curves == ("saturating", "knee", "peak")
    many = [simulated["random_rates"]("peak", sizes, np.random.default_rng(seed)) for seed in range(20)]
    assert sum(rates[sizes[-1]] < max(rates.values()) for rates in many) > 10


def test_a_simulated_load_of_a_core_is_noise_that_differs_by_size(simulated: dict[str, Any]):
    (beside,) = [scenario for scenario in simulated["GRID"] if scenario.load == 0.5]
    log_s = simulated["simulate"](beside, {4 * 2**n: 1.0 for n in range(8)}, np.random.default_rng(0))["log_s"]
    assert log_s[0].std() > 3 * log_s[-1].std()


def test_a_diagnosis_is_of_as_many_changes_as_a_real_one_and_says_its_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = runpy.run_path(str(BENCHMARKS / "diagnose.py"))
    groups, diagnoses, nothings = script["FULL"]
    assert nothings == 8 and 2 * diagnoses + nothings <= MAX_AT_ONCE
    assert script["extent"](groups, diagnoses, nothings).startswith("The 180 ratios are drawn from 80 runs in 5 groups")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What answers.py defines."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "answers.py"))


@pytest.mark.parametrize(
    ("sweeps", "said"), [(80, "80 sweeps: 76 named, 78 and 70"), (40, "40 sweeps: 38 named, 39 and 35")]
)
def test_what_is_wanted_follows_the_number_of_sweeps(sweeps: int, said: str, answers: dict[str, Any]):
    assert f"Wanted of {said} with the next two figures, at most {6 * sweeps // 80} whose" in answers["wanted"](sweeps)


def test_a_page_says_how_much_of_the_benchmark_it_is_of(answers: dict[str, Any]):
    assert answers["extent"](80, 16, "abc") == "All 80 sweeps of 80, 16 cases of 16, at commit abc."
    assert answers["extent"](8, 4, "abc").startswith("A part of the benchmark: 8 sweeps of 80, 4 cases of 16")


def test_the_best_size_is_no_better_known_than_its_ratio_to_the_next(answers: dict[str, Any]):
    columns = {"run": 0, "pass_": None, "log_s": 0.0, "taken": 0.0, "disturbed": False}
    rates = Rates(pd.DataFrame([columns | {"setting": size, "run": size} for size in (16, 32)]))
    assert math.isinf(answers["margin_of"](rates, 16))


def test_a_quiet_sweep_that_had_a_load_is_named(answers: dict[str, Any]):
    sweeps = [
        {"case": "cnn-quiet", "condition": "quiet", "turn": turn, "load": load} for turn, load in enumerate((0.02, 0.2))
    ]
    assert answers["not_quiet"](sweeps) == ["Not quiet, although nothing was started beside them: cnn-quiet 1 (20%)."]
    assert not answers["not_quiet"](sweeps[:1])


@pytest.mark.parametrize(("kept", "other"), [(["abc", "def"], ""), (["abc", None], "def")])
def test_sweeps_of_different_commits_are_refused(kept, other, answers: dict[str, Any], tmp_path: Path):
    places = [tmp_path / str(number) for number in range(len(kept))]
    for place, commit in zip(places, kept, strict=True):
        if commit:
            answers["facts_file"](place).write_text(json.dumps({"seconds": 1.0, "commit": commit}))
    answers["commit_of"].__globals__["current_commit"] = lambda: other
    with pytest.raises(UserError, match=r"commits abc and def; delete it"):
        answers["commit_of"](places, tmp_path)


def test_a_single_repetition_has_no_reference_and_is_refused(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["answers.py", "--repetitions", "1"])
    with pytest.raises(UserError, match="--repetitions: got 1, takes 2 or more"):
        answers["main"]()


@pytest.fixture
def lr_scaling(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What lr_scaling.py defines."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "lr_scaling.py"))


def test_of_three_rules_the_reference_is_trained_once_and_a_third_of_the_work_is_one_seed(lr_scaling: dict[str, Any]):
    every = lr_scaling["trainings"](["cnn", "mlp"], (1, 3), (32, 128, 512), 3)
    assert len(every) == 3 * 2 * 2 * (3 + 1 + 3)
    assert {one.rule for one in every if one.size == 128} == {"none"}
    assert [one.seed for one in every] == [0] * 28 + [1] * 28 + [2] * 28


def accuracies(errors: dict[str, float], seeds: int = 3, spread: float = 0.05, **others: float) -> pd.DataFrame:
    """Runs of a model at seven sizes with the errors of each rule; `others` are the errors at 2,048."""
    every = []
    for size in (32, 64, 128, 256, 512, 1024, 2048):
        for rule, error in (errors | (others if size == 2048 else {})).items():
            for seed in range(seeds if size != 128 or rule == "none" else 0):
                acc = 1 - error * (1 + spread * (seed - 1))
                every.append({"model": "cnn", "epochs": 1, "size": size, "rule": rule, "seed": seed, "acc": acc})
    return pd.DataFrame(every)


EVERYWHERE = "`auto`, here sqrt, is as good as the best rule everywhere within its noise"
BECOMES, NOT = "It becomes the default.", "It does not become the default."
AUTO_LEADS = {"none": 0.022, "sqrt": 0.02, "linear": 0.024}


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (accuracies(AUTO_LEADS), f"{EVERYWHERE}, and loses least on average. {BECOMES}"),
        (accuracies(AUTO_LEADS, none=0.0198), f"{EVERYWHERE}, and loses least on average. {BECOMES}"),
        (accuracies({**AUTO_LEADS, "linear": 0.0199}), f"{EVERYWHERE}, but linear loses less on average. {NOT}"),
        (accuracies(AUTO_LEADS, none=0.01), f"everywhere within its noise: it is worse for cnn at 2,048 after 1 epoch (2.00 × the error). {NOT}"),
        (accuracies(AUTO_LEADS, none=0.01, spread=0.9), f"{EVERYWHERE}, but none loses less on average. {NOT}"),
        (accuracies(AUTO_LEADS, seeds=1), "One seed does not decide"),
    ],
    ids=["best everywhere", "once a little worse", "worse on average", "once shown to be worse", "noise", "one seed"],
)  # fmt: skip
def test_the_default_is_decided_by_the_stated_criterion(runs: pd.DataFrame, said: str, lr_scaling: dict[str, Any]):
    assert said in lr_scaling["decision"](lr_scaling["shown"](runs))


def test_a_rule_of_which_one_seed_fails_is_not_excused_by_its_own_noise(lr_scaling: dict[str, Any]):
    runs = accuracies(AUTO_LEADS)
    runs.loc[(runs["size"] == 2048) & (runs["rule"] == "sqrt") & (runs["seed"] == 0), "acc"] = 0.1
    assert "it is worse for cnn at 2,048" in lr_scaling["decision"](lr_scaling["shown"](runs))


def test_a_page_has_a_row_for_each_size_and_what_each_rule_loses(lr_scaling: dict[str, Any]):
    text = lr_scaling["page"](accuracies(AUTO_LEADS), "abc")
    assert text.startswith(
        "A part of the benchmark: 57 trainings of 342, with 3 seeds, on one thread each, at commit abc."
    )
    assert "| cnn | 32 | 97.80 ± 0.11 | **98.00 ± 0.10** | 97.60 ± 0.12 |" in text
    assert "| cnn | 128 | 97.80 ± 0.11 | the same | the same |" in text
    assert "| linear | 0.40 | 0.40 | cnn at 32 after 1 epoch | 6 | " in text


@pytest.mark.slow
def test_single_operations_are_predicted_on_cards_that_were_not_fitted(tmp_path: Path):
    if not KERNELS.is_dir():
        pytest.skip(f"needs {KERNELS}")
    tool = BENCHMARKS / "device_choice"
    for line in (["measure.py", "--smallest", tmp_path], ["main.py", "--fit", KERNELS, "--test", tmp_path]):
        done = subprocess.run([sys.executable, tool / line[0], *line[1:]], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("1 devices, each predicted from the fitted ones without it.")


@pytest.mark.slow
def test_of_cards_that_were_not_fitted_few_are_called_the_first_that_are_not():
    if not KERNELS.is_dir():
        pytest.skip(f"needs {KERNELS}")
    command = [sys.executable, BENCHMARKS / "device_choice" / "orders.py", "--fit", KERNELS]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    answers, first, false, *_ = map(float, next(line for line in lines if line.startswith("operation")).split()[1:])
    assert answers == 8000 and first > 30 and false < 2.5


@pytest.mark.slow
def test_operations_of_a_step_are_judged_by_the_nearest_measured_ones():
    if not KERNELS.is_dir():
        pytest.skip(f"needs {KERNELS}")
    command = [sys.executable, BENCHMARKS / "device_choice" / "steps.py", "--fit", KERNELS, "--smallest"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in text.splitlines() if line.startswith("| arithmetic | all |"))
    error, held = map(float, line.split(" | ")[3:5])
    assert error < 50 and held > 40


@pytest.mark.slow
def test_mutations_of_every_kind_are_drawn_and_found_again():
    script = runpy.run_path(str(BENCHMARKS / "mutations.py"))
    source = BENCHMARKS.parent / "src" / "checkpointing"
    drawn = script["draw"](source, 0, 10)
    assert drawn == script["draw"](source, 0, 15)[:10]
    by_kind = {each["kind"]: each for each in drawn}
    assert set(by_kind) == set(script["KINDS"])
    for each in by_kind.values():
        assert each["before"] != each["after"]
        compile(script["mutated"](source / each["file"], script["locate"](source, each))[1], each["file"], "exec")


def test_calls_that_wait_for_the_device_are_found_in_a_trace_and_others_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 100.0, "dur": 50.0}
    names = ["cudaLaunchKernel", "cudaStreamSynchronize", "cuMemAlloc_v2", "cudaMemcpyAsync", "cudaMemcpyAsync"]
    calls = [
        {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": 101.0 + n, "dur": 2.0, "args": {"correlation": n}}
        for n, name in enumerate(names)
    ]
    copies = [
        {"ph": "X", "cat": "gpu_memcpy", "name": f"Memcpy HtoD ({kind})", "ts": 120.0, "args": {"correlation": n}}
        for n, kind in ((3, "Pinned -> Device"), (4, "Pageable -> Device"))
    ]
    script = runpy.run_path(str(BENCHMARKS / "cuda_trace.py"))
    assert script["waits"]([step, *calls, *copies], 1) == [
        "cudaStreamSynchronize at 2 µs for 2 µs",
        "cuMemAlloc_v2 at 3 µs for 2 µs",
        "cudaMemcpyAsync of pageable memory at 5 µs for 2 µs",
    ]
    with pytest.raises(script["CannotTell"], match="holds no call of CUDA"):
        script["waits"]([step], 1)
