"""A diagnosis: which changes it tries, beside what, and what its table says of them."""

import re
import zlib
from typing import NamedTuple

import numpy as np
import pytest

from batchscope.analysis.diagnose import Findings
from batchscope.analysis.read import find
from batchscope.errors import UserError
from batchscope.records.read import read, read_if_there
from batchscope.records.run_record import plan
from batchscope.sweep import diagnose
from batchscope.sweep.diagnose import changes_to_try, words_of
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job, RunFailed, search_of
from batchscope.sweep.visits import can_wait
from tests.support.command_lines import composed
from tests.sweep.conftest import ended

# --- which changes ---------------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """What this machine is pretended to have."""

    cores: int = 4
    kinds: tuple[str, ...] = ("cpu",)
    gpus: int = 1


ON_CPU, BESIDE_A_GPU = Machine(), Machine(kinds=("cpu", "cuda"))


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """Pretend a machine; at first one of two cores."""

    def pretend(machine):
        monkeypatch.setattr("batchscope.hardware.devices.available", lambda: machine.kinds)
        monkeypatch.setattr("torch.cuda.device_count", lambda: machine.gpus)
        monkeypatch.setattr(diagnose, "affinity", lambda: {*range(machine.cores)})

    pretend(Machine(cores=2))
    monkeypatch.setattr("sys.platform", "linux")
    return pretend


@pytest.fixture
def tried(pretend):
    """The options that are tried; `typed` are those that stay."""

    def tried(words="", machine=ON_CPU, factors=(2, 4), typed=None):
        pretend(machine)
        config = composed("experiment=diagnose", *words.split())
        changes = changes_to_try(config, words.split() if typed is None else typed, factors)
        return [" ".join(words_of(change)) for change in changes]

    return tried


def test_on_a_cpu_and_on_gpus(tried):
    batches = ["data.batch_size=256", "data.batch_size=512"]
    others = "trainer.precision=bf16-mixed data.pipeline=workers channels_last=false"
    assert tried() == [*batches, *others.split()]
    others = "trainer.precision=bf16-mixed trainer.precision=16-mixed data.pipeline=device data.pipeline=workers"
    others += " channels_last=false trainer.devices=4"
    gpus = Machine(16, ("cpu", "cuda"), 4)
    assert tried("", gpus) == [*batches, *others.split()]


@pytest.mark.parametrize("line", ["trainer.accelerator=cpu", "trainer=cpu"])
def test_what_the_user_has_set_stays(line, tried):
    found = tried(f"{line} data.batch_size=64", machine=BESIDE_A_GPU)
    assert not any("batch_size" in one or "accelerator" in one for one in found)


def test_a_batch_size_that_is_no_option_of_the_data_is_not_tried():
    config = composed("experiment=diagnose")
    del config["data"]["batch_size"]
    changes = changes_to_try(config, [], (2, 4))
    assert not any("data.batch_size" in change for change in changes)


SEQUENCE, WORKERS = "model=stacked_lstm data=adding", "data.pipeline=workers"
# What the configuration has, and how it was measured → changes that are tried, and those that are not (-).
OFFERED = [
    ("", {"factors": ()}, "-data.batch_size"),
    ("global_batch_size=384", {"factors": (2, 3)}, "data.batch_size=384 -data.batch_size=256"),
    ("trainer.accelerator=cpu", {"machine": BESIDE_A_GPU}, "trainer.accelerator=gpu"),
    ("trainer.accumulate_grad_batches=3", {}, "data.batch_size=384 trainer.accumulate_grad_batches=1"),
    ("trainer.precision=bf16-mixed", {}, "trainer.precision=32-true"),
    (WORKERS, {}, "data.num_workers=4 data.pipeline=memory"),
    (WORKERS, {"machine": Machine(cores=2)}, "-data.num_workers"),
    (SEQUENCE, {}, "-channels_last -model.backend"),
    (f"{SEQUENCE} model.backend=reference", {}, "model.backend=fused"),
]


@pytest.mark.parametrize(("words", "how", "changes"), OFFERED)
def test_a_change_is_tried_where_it_can_have_an_effect(words, how, changes, tried):
    found = [option for change in tried(words, typed=[], **how) for option in change.split()]
    for change in changes.split():
        assert any(one.startswith(change.lstrip("-")) for one in found) is not change.startswith("-")


# --- the runs --------------------------------------------------------------------------------------------------------

WORDS = ["experiment=diagnose", "model=mlp", "data.num_workers=2"]


def diagnosed(folder, rate, *words):
    """The jobs of each yield of a diagnosis, whose runs take no time; what its report says, and what has ended it.

    `rate` is of a configuration: samples/s, or the status of a run that failed. Runs that are not kept share passes where
    they can.
    """
    yields, loop = [], Loop()

    def do(job, passes):
        if read_if_there(job.run_dir):
            return read(job.run_dir)
        found = rate({**job.config, "run_dir": str(job.run_dir)})
        if found == "signal":
            plan(job.run_dir, config=job.config, **job.facts)
            raise SystemExit(143)
        facts = {"dataset": {"name": "mnist", "train_samples": 55_000}, "hardware": {"device": "cpu"}}
        facts["started"] = f"2026-01-01T00:00:{sum(map(len, yields)):02d}"
        if isinstance(found, str):
            return ended(job, 1.0, status=found, error="trainer: a reason", throughput={}, **facts)
        noise = np.exp(0.01 * np.random.default_rng(zlib.crc32(job.run_dir.name.encode())).standard_normal((8, 10)))
        return ended(job, 1e3 * job.config["data"]["batch_size"] / found, noise, passes, **facts)

    def do_all(jobs):
        yields.append(jobs)
        first = 100 * len(list(folder.rglob("run.json")))
        shared = range(first, first + 8)
        return [do(job, shared if len(jobs) > 1 and can_wait(job.config) else None) for job in jobs]

    config = composed(*WORDS, *words)
    job, end = Job(folder / "0", config, {"choices": {"model": "mlp"}, "overrides": [*WORDS, *words]}, "run 1"), None
    loop.do = do_all
    try:
        loop.run(search_of(config).plan(job))
    except (UserError, SystemExit) as error:
        end = error
    return yields, Findings(find([folder]).runs).text, end


def names(yields):
    """The folders of the runs of each yield."""
    return [[job.run_dir.name for job in jobs] for jobs in yields]


def faster_with_a_larger_batch(config):
    rate = 10.0 * config["data"]["batch_size"]
    return rate * (1.5 if config["trainer"]["precision"] == "bf16-mixed" else 1.0)


CHANGES = [
    *("batch_size-256", "batch_size-512", "precision-bf16-mixed", "pipeline-workers"),
    "channels_last-false",
]


def test_a_baseline_and_all_changes_beside_it(tmp_path):
    ((baseline, *changes),), said, _ = diagnosed(tmp_path, faster_with_a_larger_batch, "trainer.accelerator=cpu")
    assert names([[baseline, *changes]]) == [["baseline", *CHANGES]]
    assert (baseline.title, changes[0].title) == ("run 1 of 6: baseline", "run 2 of 6: data.batch_size=256")
    seconds = baseline.config["callbacks"]["until_known"]["seconds"]
    assert {job.seconds for job in [baseline, *changes]} == {seconds}
    assert re.match(r"Recommended: data.batch_size=512, (4\.0|3\.9)\d ", said)
    assert any(line.endswith(" … data.batch_size=512") for line in said.splitlines())


def test_where_runs_cannot_wait_the_baseline_follows_the_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.sweep.test_diagnose.can_wait", lambda config: False)
    monkeypatch.setattr(diagnose, "can_wait", lambda config: False)
    yields, said, _ = diagnosed(tmp_path, faster_with_a_larger_batch)
    assert names(yields) == [["baseline", *CHANGES, "baseline_2"]]
    assert said.startswith("Recommended: data.batch_size=512")


@pytest.mark.parametrize("status", ["out_of_memory", "finished"])
def test_a_baseline_without_a_rate_ends_the_diagnosis_with_the_reason(status, tmp_path):
    _, _, end = diagnosed(tmp_path, lambda config: status)
    assert isinstance(end, RunFailed if status == "out_of_memory" else UserError)


def test_started_again_it_has_the_same_runs(tmp_path):
    ran = [names(diagnosed(tmp_path, faster_with_a_larger_batch)[0]) for _ in range(2)]
    assert ran[0] == ran[1]


INTERRUPTED = "No change can be compared with the baseline: not run."
REFUSED = "No change helps: of 4 changes compared, none is shown to be faster than the baseline; the best is"
# A part of the configuration of one run, and how that run goes → how many runs there are, and what the report says.
ENDS = {
    "it is interrupted": ("batch_size-256'", "signal", 6, INTERRUPTED),
    "a change is refused": ("bf16-mixed'", "failed", 6, REFUSED),
    "the baseline fails": ("baseline'", "out_of_memory", 6, "The baseline was not measured, so there is nothing to compare."),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_whatever_happens_the_report_says_it(name, tmp_path):
    part, how, runs, line = ENDS[name]
    yields, said, end = diagnosed(tmp_path, lambda config: how if part in str(config) else 100.0)
    assert line in " ".join(said.split())
    assert ("refused: trainer: a reason" in said) is (how == "failed")
    is_failure = isinstance(end, RunFailed)
    assert sum(map(len, yields)) == runs
    assert is_failure == (how == "out_of_memory")
