"""A diagnosis: which changes it tries, beside what, and what the report says of them."""

import zlib
from typing import Annotated, NamedTuple

import numpy as np
import pytest

from batchscope.analysis.report import analyse
from batchscope.errors import UserError
from batchscope.options.types import Range
from batchscope.records.read import read, read_or_empty
from batchscope.records.run_record import write_planned
from batchscope.sweep import diagnose
from batchscope.sweep.diagnose import changes_to_try, overrides_for
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job, RunFailed, build_search
from batchscope.sweep.visits import can_wait
from tests.support.command_lines import composed
from tests.sweep.conftest import ended

# --- which changes ---------------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """The simulated hardware."""

    cores: int = 4
    kinds: tuple[str, ...] = ("cpu",)
    gpus: int = 1


ON_CPU, BESIDE_A_GPU = Machine(), Machine(kinds=("cpu", "cuda"))


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """A function that simulates a machine; the default one has two cores."""

    def pretend(machine):
        monkeypatch.setattr("batchscope.hardware.devices.available", lambda: machine.kinds)
        monkeypatch.setattr("torch.cuda.device_count", lambda: machine.gpus)
        monkeypatch.setattr(diagnose, "affinity", lambda: {*range(machine.cores)})

    pretend(Machine(cores=2))
    monkeypatch.setattr("sys.platform", "linux")
    return pretend


@pytest.fixture
def tried(pretend):
    """A function that returns the options that are tried; `typed` ones stay."""

    def tried(words="", machine=ON_CPU, typed=None):
        pretend(machine)
        config = composed("experiment=diagnose", *words.split())
        changes = changes_to_try(config, words.split() if typed is None else typed)
        return [" ".join(overrides_for(change)) for change in changes]

    return tried


def test_on_a_cpu_and_on_gpus(tried):
    assert tried() == ["trainer.precision=bf16-mixed", "data.pipeline=workers", "channels_last=false"]
    on_gpus = "trainer.precision=bf16-mixed trainer.precision=16-mixed data.pipeline=device data.pipeline=workers"
    on_gpus += " channels_last=false trainer.devices=4"
    assert tried("", Machine(16, ("cpu", "cuda"), 4)) == on_gpus.split()


@pytest.mark.parametrize("line", ["trainer.accelerator=cpu", "trainer=cpu"])
def test_what_the_user_has_set_stays(line, tried):
    changes = tried(f"{line} data.pipeline=memory", machine=BESIDE_A_GPU)
    assert not any("pipeline" in change or "accelerator" in change for change in changes)


class OneWorker:
    """Data of the user's own, which start one worker at most."""

    def __init__(self, num_workers: Annotated[int, Range(0, 1)] = 0) -> None:
        pass


class Workers(OneWorker):
    """Data of the user's own, which start any number of workers."""

    def __init__(self, num_workers: int = 0) -> None:
        pass


@pytest.mark.parametrize("kind", [OneWorker, Workers])
def test_a_change_that_the_data_refuse_is_not_tried(kind):
    config = composed("experiment=diagnose")
    config["data"] = {"_target_": f"{__name__}.{kind.__name__}", "num_workers": 0}
    assert any("data.num_workers" in change for change in changes_to_try(config, [])) is (kind is Workers)


SEQUENCE, WORKERS = "model=stacked_lstm data=adding", "data.pipeline=workers"
# Options of the configuration, and the simulated machine → changes that are tried, and those that are not (-).
OFFERED = [
    ("trainer.accelerator=cpu", {"machine": BESIDE_A_GPU}, "trainer.accelerator=gpu"),
    ("trainer.precision=bf16-mixed", {}, "trainer.precision=32-true"),
    (WORKERS, {}, "data.num_workers=4 data.pipeline=memory"),
    (WORKERS, {"machine": Machine(cores=2)}, "-data.num_workers"),
    (SEQUENCE, {}, "-channels_last -model.backend"),
    (f"{SEQUENCE} model.backend=reference", {}, "model.backend=fused"),
]


@pytest.mark.parametrize(("words", "how", "changes"), OFFERED)
def test_a_change_is_tried_where_it_can_have_an_effect(words, how, changes, tried):
    options = [option for change in tried(words, typed=[], **how) for option in change.split()]
    for change in changes.split():
        assert any(word.startswith(change.lstrip("-")) for word in options) is not change.startswith("-")


# --- the runs --------------------------------------------------------------------------------------------------------

WORDS = ["experiment=diagnose", "model=mlp", "data.num_workers=2"]


def diagnosed(folder, rate, *words):
    """Simulate a diagnosis: return the jobs of each yield, the analysis, and the error that ended it.

    `rate` is of a configuration: samples/s, or the status of a run that failed. Runs that are not kept share passes where
    they can.
    """
    yields, loop = [], Loop()

    def do(job, passes):
        if read_or_empty(job.run_dir):
            return read(job.run_dir)
        outcome = rate({**job.config, "run_dir": str(job.run_dir)})
        if outcome == "signal":
            write_planned(job.run_dir, config=job.config, **job.record_fields)
            raise SystemExit(143)
        fields = {"dataset": {"name": "mnist", "train_samples": 55_000}, "hardware": {"device": "cpu"}}
        fields["started"] = f"2026-01-01T00:00:{sum(map(len, yields)):02d}"
        if isinstance(outcome, str):
            return ended(job, 1.0, status=outcome, error="trainer: a reason", throughput={}, **fields)
        noise = np.exp(0.01 * np.random.default_rng(zlib.crc32(job.run_dir.name.encode())).standard_normal((8, 10)))
        return ended(job, 1e3 * job.config["data"]["batch_size"] / outcome, noise, passes, **fields)

    def do_all(jobs):
        yields.append(jobs)
        first = 100 * len(list(folder.rglob("run.json")))
        shared = range(first, first + 8)
        return [do(job, shared if len(jobs) > 1 and can_wait(job.config) else None) for job in jobs]

    config = composed(*WORDS, *words)
    job, end = Job(folder / "0", config, {"choices": {"model": "mlp"}, "overrides": [*WORDS, *words]}, "run 1"), None
    loop.do = do_all
    try:
        loop.run(build_search(config).plan(job))
    except (UserError, SystemExit) as error:
        end = error
    return yields, analyse([folder]), end


def names(yields):
    """The folders of the runs of each yield."""
    return [[job.run_dir.name for job in jobs] for jobs in yields]


def faster_in_bf16(config):
    return 1500.0 if config["trainer"]["precision"] == "bf16-mixed" else 1000.0


def test_a_baseline_and_all_changes_beside_it_are_reported_as_settings(tmp_path):
    ((baseline, *changes),), report, _ = diagnosed(tmp_path, faster_in_bf16, "trainer.accelerator=cpu")
    assert names([[baseline, *changes]]) == [["0", "1", "2", "3"]]
    assert (baseline.title, changes[0].title) == ("run 1 of 4: baseline", "run 2 of 4: trainer.precision=bf16-mixed")
    seconds = baseline.config["callbacks"]["until_known"]["seconds"]
    assert {job.seconds for job in [baseline, *changes]} == {seconds}
    assert report.remarks[0].startswith("mlp · bf16-mixed is the fastest: 1.5")
    settings = report.setting_texts.set_index("setting")["÷ first"]
    assert [*settings.index] == ["mlp", "mlp · bf16-mixed", "mlp · workers", "mlp · channels_last false"]
    assert [cell[:3] for cell in settings][:2] == ["", "1.5"]


def test_where_runs_cannot_wait_the_baseline_follows_the_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.sweep.test_diagnose.can_wait", lambda config: False)
    monkeypatch.setattr(diagnose, "can_wait", lambda config: False)
    yields, report, _ = diagnosed(tmp_path, faster_in_bf16)
    assert [job.title.partition(": ")[2] for job in yields[0]][::4] == ["baseline", "baseline"]
    assert report.setting_texts["runs"].tolist() == ["2", "1", "1", "1"]


@pytest.mark.parametrize("status", ["out_of_memory", "finished"])
def test_a_baseline_without_a_rate_ends_the_diagnosis_with_the_reason(status, tmp_path):
    _, _, end = diagnosed(tmp_path, lambda config: status)
    assert isinstance(end, RunFailed if status == "out_of_memory" else UserError)


def test_started_again_it_has_the_same_runs(tmp_path):
    ran = [names(diagnosed(tmp_path, faster_in_bf16)[0]) for _ in range(2)]
    assert ran[0] == ran[1]


# A part of the configuration of one run, and how that run goes → what the report says.
ENDS = {
    "it is interrupted": ("bf16-mixed'", "signal", "mlp · bf16-mixed: not run"),
    "a change is refused": ("bf16-mixed'", "failed", "mlp · bf16-mixed: trainer: a reason"),
    "the baseline fails": ("/0/0'", "out_of_memory", "mlp: out of memory"),
}


@pytest.mark.parametrize("name", ENDS)
def test_whatever_happens_the_report_says_it(name, tmp_path):
    part, outcome, line = ENDS[name]
    (jobs,), report, end = diagnosed(tmp_path, lambda config: outcome if part in str(config) else 100.0)
    assert report.failures == line
    assert len(jobs) == 4
    assert isinstance(end, RunFailed) == (outcome == "out_of_memory")
