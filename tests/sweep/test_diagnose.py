"""A diagnosis: which changes it tries, in which order, and what its table says of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchscope.analysis.diagnose import write_diagnosis
from batchscope.analysis.run import Run
from batchscope.sweep import diagnose
from batchscope.sweep.changes import Machine, changes_to_try, fixed_options, words_of
from batchscope.sweep.plans import Job, RunFailed
from batchscope.sweep.search import search_of
from tests.support.command_lines import answer, composed
from tests.sweep.conftest import ended, play

# --- which changes ---------------------------------------------------------------------------------------------------

ON_CPU, BESIDE_A_GPU = Machine(cores=4), Machine(accelerators=("cpu", "cuda"), cores=4)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch):
    monkeypatch.setattr(diagnose, "this_machine", lambda device: Machine(cores=2))
    monkeypatch.setattr("sys.platform", "linux")


def tried(words="", machine=ON_CPU, device="cpu", size=128, processes=1, kind="compute", factors=(2, 4), fixed=None):
    """The options that are tried after such a baseline, and the lines on what is left out."""
    throughput = {"batch_size": size, "bottleneck": {"kind": kind}}
    facts = {"hardware": {"device": device}, "dataset": {"train_samples": 55_000}, "processes": processes}
    baseline = Run("baseline", Path("x"), {"status": "finished", "throughput": throughput, **facts})
    config = composed("experiment=diagnose", *words.split(), run_dir="x")
    fixed = fixed_options(words.split()) if fixed is None else fixed
    changes, left_out = changes_to_try(config, baseline, machine, fixed, factors)
    return [" ".join(words_of(change)) for change in changes], left_out


def test_on_a_cpu_and_on_gpus():
    batches = ["data.batch_size=256", "data.batch_size=512"]
    others = "trainer.precision=bf16-mixed data.pipeline=workers channels_last=false keep_freed_memory=false"
    assert tried() == ([*batches, *others.split()], [])
    others = "trainer.precision=bf16-mixed trainer.precision=16-mixed data.pipeline=device data.pipeline=workers"
    others += " channels_last=false trainer.accelerator=cpu trainer.devices=4"
    gpus = replace(BESIDE_A_GPU, devices=4, cores=16)
    assert tried("", gpus, "cuda", kind="host")[0] == [*batches, *others.split()]


@pytest.mark.parametrize("line", ["trainer.accelerator=cpu", "trainer=cpu"])
def test_what_the_user_has_set_stays_and_is_said(line):
    found, left_out = tried(f"{line} data.batch_size=64", machine=BESIDE_A_GPU)
    assert not any("batch_size" in one or "accelerator" in one for one in found)
    assert left_out == [
        f"not tried: {change}: you have set {change.partition('=')[0]}"
        for change in ("data.batch_size=256", "data.batch_size=512", "trainer.accelerator=gpu")
    ]


SEQUENCE, WORKERS = "model=stacked_lstm data=adding", "data.pipeline=workers"
# What the configuration has, and how it was measured → changes that are tried, and those that are not (-).
OFFERED = [
    ("", {"size": 20_000}, "data.batch_size=40000 data.batch_size=55000"),
    ("", {"size": 55_000}, "-data.batch_size"),
    ("", {"size": 20_000, "processes": 2}, "data.batch_size=27500"),
    ("", {"factors": ()}, "-data.batch_size"),
    ("global_batch_size=384", {"factors": (2, 3)}, "data.batch_size=384 -data.batch_size=256"),
    ("trainer.precision=32-true", {"machine": BESIDE_A_GPU}, "trainer.accelerator=gpu"),
    ("trainer.accumulate_grad_batches=3", {}, "data.batch_size=384 trainer.accumulate_grad_batches=1"),
    ("trainer.precision=bf16-mixed", {}, "trainer.precision=32-true"),
    (WORKERS, {}, "data.num_workers=4 data.pipeline=memory"),
    (WORKERS, {"machine": Machine(cores=2)}, "-data.num_workers"),
    (SEQUENCE, {}, "-channels_last -model.backend"),
    (f"{SEQUENCE} model.backend=reference", {}, "model.backend=fused"),
]


@pytest.mark.parametrize(("words", "how", "changes"), OFFERED)
def test_a_change_is_tried_where_it_can_have_an_effect(words, how, changes):
    found = [option for change in tried(words, fixed=set(), **how)[0] for option in change.split()]
    for change in changes.split():
        assert any(one.startswith(change.lstrip("-")) for one in found) is not change.startswith("-")


# --- the runs --------------------------------------------------------------------------------------------------------

WORDS = ["experiment=diagnose", "model=mlp", "data.num_workers=2"]


def diagnosed(folder, rate, *words):
    """The runs of a diagnosis, which take no time; what its report says, and what has ended it.

    `rate` is of a configuration: samples/s, or the status of a run that failed.
    """
    jobs = []

    def do(job):
        jobs.append(job)
        found = rate(job.config)
        if found == "signal":
            raise SystemExit(143)
        facts = {"dataset": {"name": "mnist", "train_samples": 55_000}, "hardware": {"device": "cpu"}}
        facts["started"] = f"2026-01-01T00:00:{len(jobs):02d}"
        if isinstance(found, str):
            return ended(job, 1.0, status=found, error="trainer: a reason", throughput={}, **facts)
        noise = np.exp(0.01 * np.random.default_rng(0).standard_normal((8, 10)))
        return ended(job, 1e3 * job.config["data"]["batch_size"] / found, noise, **facts)

    config = composed(*WORDS, *words, run_dir=folder / "0")
    job, end = Job(folder / "0", config, {"choices": {"model": "mlp"}, "overrides": [*WORDS, *words]}), None
    try:
        play(diagnose.diagnose(job, search_of(config)), do)
    except (RunFailed, SystemExit) as error:
        end = error
    return jobs, write_diagnosis(folder), end


def faster_with_a_larger_batch(config):
    rate = 10.0 * config["data"]["batch_size"]
    return rate * (1.5 if config["trainer"]["precision"] == "bf16-mixed" else 1.0)


def test_a_baseline_each_change_the_two_best_together_and_the_baseline_again(tmp_path):
    jobs, said, _ = diagnosed(tmp_path, faster_with_a_larger_batch)
    assert [job.run_dir.name for job in jobs] == [
        *("baseline", "batch_size-256", "batch_size-512", "precision-bf16-mixed", "pipeline-workers"),
        *("channels_last-false", "keep_freed_memory-false", "batch_size-512+precision-bf16-mixed", "baseline_again"),
    ]
    assert [job.title for job in jobs[:2]] == ["run 1: baseline", "run 2 of at most 9: data.batch_size=256"]
    assert said.startswith("Recommended: data.batch_size=512 trainer.precision=bf16-mixed, 6.00 ")
    assert any(line.endswith(" … data.batch_size=512 trainer.precision=bf16-mixed") for line in said.splitlines())
    written = (tmp_path / "report/diagnosis.md").read_bytes()
    assert answer("report", tmp_path)[:2] == (0, f"{said}\n")
    assert (tmp_path / "report/diagnosis.md").read_bytes() == written
    assert [path.name for path in (tmp_path / "report").iterdir() if "sweep" in path.name] == []


def test_started_again_it_has_the_same_runs(tmp_path):
    """Although a baseline at the end that differs leaves no change that is shown to help."""

    def rate(config):
        return 1e5 if config["run_dir"].endswith("again") else faster_with_a_larger_batch(config)

    ran = [[job.run_dir.name for job in diagnosed(tmp_path, rate)[0]] for _ in range(2)]
    assert ran[0] == ran[1] and any("+" in name for name in ran[0])


INTERRUPTED = "Incomplete: 6 changes tried, and the baseline was not measured again after that, so no change is"
REFUSED = "No change helps: of 6 changes tried, none is shown to be faster than the"
# A part of the configuration of one run, and how that run goes → how many runs there are, and what the report says.
ENDS = {
    "it is interrupted": ("again'", "signal", 8, INTERRUPTED),
    "a change is refused": ("bf16-mixed'", "failed", 8, REFUSED),
    "the baseline fails": ("baseline'", "out_of_memory", 1, "The baseline was not measured, so there is nothing to compare."),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_whatever_happens_the_report_says_it(name, tmp_path):
    part, how, runs, line = ENDS[name]
    jobs, said, end = diagnosed(tmp_path, lambda config: how if part in str(config) else 100.0)
    assert line in " ".join(said.split())
    assert ("refused: trainer: a reason" in said) is (how == "failed")
    is_failure = isinstance(end, RunFailed)
    assert (len(jobs), answer("report", tmp_path).code) == (runs, int(is_failure)) and is_failure is (runs == 1)


def test_what_the_user_has_set_is_said_when_the_changes_are_chosen_and_below_the_table(tmp_path, capsys):
    _, said, _ = diagnosed(tmp_path, lambda config: 100.0, "data.pipeline=memory")
    for shown in (capsys.readouterr().out, said):
        assert "not tried: data.pipeline=workers: you have set data.pipeline" in " ".join(shown.split())
