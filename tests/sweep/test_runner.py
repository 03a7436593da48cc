"""Sweeps as their users start them: real command lines, real processes, real signals."""

import contextlib
import json
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from batchscope.records.step_times import read_step_times
from batchscope.sweep.plans import RunFailed
from batchscope.sweep.runner import SweepRunner
from tests.support.runs import assert_alike, results
from tests.support.spawned import TRAIN, Ended, end, spawn
from tests.support.waiting import wait_until

TINY = [
    *("model=rnn_cell", "data=adding", "data.num_train=64", "data.num_val=16", "data.num_test=16"),
    *("data.sequence_length=5", "trainer.max_epochs=1", "test=false", "callbacks.throughput.calibrate=false"),
    *("callbacks.progress=null", "callbacks.prediction_images=null", "hydra.sweep.dir=s"),
]
ENDLESS = "trainer.max_epochs=1,1000000"  # the second run continues until it is stopped


def start(cwd: Path, *options: str, **environ: str) -> subprocess.Popen[str]:
    return spawn(cwd, TRAIN, "-m", *TINY, *options, **environ)


def sweep(cwd: Path, *options: str) -> Ended:
    """A whole sweep."""
    return end(start(cwd, *options))


def record(cwd: Path, run: str) -> dict:
    return json.loads((cwd / "s" / run / "run.json").read_text())


def wait_until_trains(cwd: Path, run: str) -> int:
    """Wait for a run's first curves and first checkpoint, and return the number of its process."""
    files = [cwd / "s" / run / name for name in ("csv/metrics.csv", "checkpoints/last.ckpt")]
    wait_until(lambda: process_of(cwd, run) and all(file.exists() for file in files), "the run does not start")
    return process_of(cwd, run)


def process_of(cwd: Path, run: str) -> int | None:
    """The process that trains in a folder, if there is one: the one that has a file of the folder open."""
    folder = (cwd / "s" / run).resolve()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            opened = [file.resolve() for file in (process / "fd").iterdir()]
            if any(file.is_relative_to(folder) for file in opened):
                return int(process.name)
    return None


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")


@pytest.mark.slow
@linux
def test_a_killed_sweep_ends_its_run_and_resumed_keeps_what_was_finished(tmp_path: Path) -> None:
    killed = start(tmp_path, ENDLESS)
    wait_until_trains(tmp_path, "1")
    killed.kill()
    killed.communicate()
    wait_until(lambda: not process_of(tmp_path, "1"), "the run outlives its sweep")
    before = (tmp_path / "s/0/run.json").read_bytes()

    resumed = start(tmp_path, ENDLESS)
    wait_until(lambda: record(tmp_path, "1").get("resumed"), "the run is not resumed")
    assert (tmp_path / "s/0/run.json").read_bytes() == before
    resumed.send_signal(signal.SIGINT)  # a sweep that a signal stops reports its results
    code, out, err = end(resumed)
    assert code == 130
    assert "Traceback" not in err
    assert re.search(r"— run 1 of 2: trainer.max_epochs=1 — kept", out), out
    assert re.search(r"— run 2 of 2: trainer.max_epochs=1000000$", out, re.MULTILINE), out
    assert "2 runs: 1 finished, 1 interrupted" in out
    assert "stopped  1 of 2: trainer.max_epochs=1000000, which continues from its checkpoint" in out
    assert "hydra.sweep.dir=s" in out.splitlines()[-1]
    assert process_of(tmp_path, "1") is None
    assert [entry["step"] > 0 for entry in record(tmp_path, "1")["resumed"]] == [True]


@pytest.mark.slow
def test_a_run_that_fails_stops_no_other_and_is_exit_code_1(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "trainer.max_epochs=-1,1")
    assert code == 1
    assert "  failed: optimizer.schedule: one_cycle needs an end" in err
    assert err.count("one_cycle needs an end") == 1
    assert "Traceback" not in err
    assert "2 runs: 1 failed, 1 finished" in out
    assert record(tmp_path, "0")["error"].startswith("optimizer.schedule: one_cycle needs an end")
    code, out, err = sweep(tmp_path, "trainer.max_epochs=-1,1")  # it would fail again
    assert code == 1
    assert out.count(" — kept") == 2
    assert "to run it again with the sweep: mv s/0 s/0.aside" in err


def test_a_failure_comes_back_from_another_process() -> None:
    """As a launcher brings it to a searching sweeper."""
    came = pickle.loads(pickle.dumps(RunFailed("s/0: a bug")))
    assert (str(came), came.exit_code, came.reported) == ("s/0: a bug", 1, True)


def test_an_interrupted_sweep_says_which_runs_were_stopped_and_which_never_began(tmp_path: Path, capsys) -> None:
    for name, status, checkpoint in (("0", "finished", True), ("1", "interrupted", True), ("2", "interrupted", False)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps({"schema": 3, "status": status}))
        if checkpoint:
            (tmp_path / name / "checkpoints/last.ckpt").touch()
    SweepRunner(tmp_path, ["lr=1", "lr=2", "lr=3", "lr=4"]).print_remaining()
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "stopped  2 of 4: lr=2, which continues from its checkpoint · lr=3, which begins anew",
        "not run  1 of 4: lr=4",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["pipeline=memory", "pipeline=workers"])
def test_a_forked_run_ends_in_the_bits_the_memory_and_the_threads_of_a_run_alone(tmp_path: Path, loader: str) -> None:
    options = ["trainer.max_epochs=5", "data.batch_size=8", "model.hidden_size=512", f"data.{loader}"]
    code, _, err = sweep(tmp_path, *options, "seed=1,0")
    assert code == 0, err
    assert end(spawn(tmp_path, TRAIN, *TINY[:-1], *options, "seed=0", "hydra.run.dir=alone")).code == 0
    forked, alone = tmp_path / "s/1", tmp_path / "alone"
    assert_alike(results(forked), results(alone))
    of_forked, of_alone = (json.loads((folder / "run.json").read_text()) for folder in (forked, alone))
    assert of_forked["hardware"] == of_alone["hardware"]  # it has the number of threads
    peaks = [one["throughput"]["memory_peak_gib"] for one in (of_forked, of_alone)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


@pytest.mark.slow
def test_the_peak_memory_of_a_small_run_after_a_large_one_is_that_of_the_small_run_alone(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    sizes = ["model=lstm_cell", "data.num_train=40000", "data.sequence_length=20", "trainer.limit_train_batches=3"]
    sizes += ["callbacks.throughput.warmup_steps=0", "callbacks.throughput.record_operations=false"]  # two updates
    code, *_ = sweep(tmp_path, *sizes, "data.batch_size=20000,8")
    assert code == 0
    sweep(tmp_path / "alone", *sizes, "data.batch_size=8")
    large, after = (record(tmp_path, run)["throughput"]["memory_peak_gib"] for run in ("0", "1"))
    alone = record(tmp_path / "alone", "0")["throughput"]["memory_peak_gib"]
    assert large > 1.5 * alone
    assert after == pytest.approx(alone, rel=0.03)


@pytest.mark.slow
def test_what_does_not_fit_into_memory_is_a_result(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "data.num_train=64,100000000000")
    assert code == 0, err
    assert record(tmp_path, "1")["status"] == "out_of_memory"
    assert "1 out of memory" in out


@pytest.mark.slow
def test_a_search_runs_short_timed_runs_and_recommends_one_of_them(tmp_path: Path) -> None:
    short = ["experiment=find_batch_size", "callbacks.until_known.seconds=1", "search.max_runs=3"]
    short += ["data.num_train=20000"]  # which the runs end in the middle of
    code, out, err = sweep(tmp_path, *short)
    assert code == 0, err
    ran = sorted(int(path.parent.name) for path in (tmp_path / "s/0").glob("*/run.json"))
    assert len(ran) <= 3 and ran[:2] == [8, 32]
    recommended = re.search(r"→ (?:Undecided between )?([\d,]+) ", out.split("runs:")[-1])
    assert "The machine was busy" in out or int(recommended[1].replace(",", "")) in ran
    first = record(tmp_path, "0/8")
    assert 6 <= first["steps"] < 20000 / 8
    assert "val/loss" not in first["metrics"]


@pytest.mark.slow
def test_a_sweep_over_devices_says_what_they_bring_and_what_they_wait(tmp_path: Path) -> None:
    several = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1,2", "data.num_train=4000"]
    code, out, err = sweep(tmp_path, *several, "data.batch_size=4")
    assert code == 0, err
    says = r"rnn_cell: 2 devices with 4 samples each reach [\d.]+ times .*; they wait for gradients in \d+ % of a step"
    is_busy = "The machine was busy" in out  # then no setting is called faster
    assert is_busy or re.search(says, " ".join(out.split())), out
    both = record(tmp_path, "1")["throughput"]
    assert 0 < both["communication_ms"] < both["parts_ms"]["backward"]
    assert both["gradient_bytes"] == 4 * record(tmp_path, "1")["model"]["parameters"]
    assert "communication_ms" not in record(tmp_path, "0")["throughput"]


@pytest.mark.slow
def test_a_searching_sweeper_gets_its_metric(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    code, out, err = sweep(tmp_path, *search, "optimizer.lr=interval(1e-4,1e-1)")
    assert code == 0, err
    assert "3 runs: 3 finished" in out
    rates = {record(tmp_path, str(run))["config"]["optimizer"]["lr"] for run in range(3)}
    assert len(rates) == 3 and all(1e-4 <= rate <= 1e-1 for rate in rates)
    losses = [record(tmp_path, str(run))["metrics"]["val/loss"] for run in range(3)]
    found = OmegaConf.load(tmp_path / "s/optimization_results.yaml")
    assert found.best_value == pytest.approx(min(losses))


@pytest.mark.slow
def test_runs_at_the_same_time_are_reported_as_well(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    code, out, err = sweep(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1,2")
    assert code == 0, err
    assert "3 runs: 3 finished" in out


@pytest.mark.slow
@linux
def test_timed_runs_on_a_cpu_are_measured_in_passes(tmp_path: Path) -> None:
    timed = ["experiment=throughput", "data.batch_size=4,16", "trainer.accelerator=cpu", "trainer.max_epochs=-1"]
    code, out, err = sweep(tmp_path, *timed)
    assert code == 0, err
    assert "preparing 2 settings" in out
    assert "median" not in out  # what each run prints is left to -v
    assert "2 runs: 2 finished" in out
    visits = [set(read_step_times(tmp_path / "s" / number).pass_.tolist()) - {-1} for number in "01"]
    assert len(visits[0] & visits[1]) >= 3
    for number in "01":
        assert record(tmp_path, number)["throughput"]["ended"].startswith(("known to ± ", "time limit"))
