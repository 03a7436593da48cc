"""Sweeps by their command lines: stand-ins in this process; slow real runs with signals, launchers and sweepers."""

import os
import pickle
import re
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope.errors import Interrupted
from batchscope.options.compose import compose, compose_command_line
from batchscope.records.metrics import card
from batchscope.records.step_times import read_step_times
from batchscope.sweep import runner
from batchscope.sweep.plans import RunFailed
from tests.support.command_lines import answer
from tests.support.fake_slurm import install
from tests.support.marks import LINUX
from tests.support.runs import assert_alike, record, results
from tests.support.spawned import TRAIN, end, spawn
from tests.support.waiting import wait_until
from tests.sweep.conftest import job

TINY = [
    *("model=rnn_cell", "data=adding", "data.num_train=64", "data.num_val=16", "data.num_test=16"),
    *("data.sequence_length=5", "trainer.max_epochs=1", "test=false", "callbacks.throughput.calibrate=false"),
    *("callbacks.progress=null", "hydra.sweep.dir=s"),
]


@pytest.fixture
def cwd(loop, tmp_path, monkeypatch, no_plots):
    """The working directory of sweeps of stand-ins: each run executes the file `<run>.does`."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_run_that_fails_stops_no_other_and_one_that_does_not_fit_is_a_result(cwd):
    (cwd / "0.does").write_text("record['status'] = 'out_of_memory'")
    (cwd / "1.does").write_text("sys.exit(7)")
    code, out, err = answer("train", "-m", *TINY, "seed=1,2,3")
    assert (code, err) == (1, "  out of memory: out_of_memory\n  failed: ended with exit code 7 and said no more\n")
    assert re.findall("\n— (run . of 3: seed=.)", out) == [f"run {n} of 3: seed={n}" for n in (1, 2, 3)]
    assert out.startswith("\n— run 1 of 3: seed=1\n") and "\n  0 s\n" in out
    assert "3 runs: 1 out of memory, 1 failed, 1 finished" in out
    code, out, err = answer("train", "-m", *TINY, "seed=1,2,3")
    assert (code, out.count(" — kept")) == (1, 3)
    assert len((cwd / "s/pids").read_text().split()) == 3


def test_a_report_that_cannot_be_written_is_one_line_and_the_sweep_ends_with_1(cwd):
    (cwd / "s").mkdir()
    (cwd / "s/report").write_text("a file")
    code, _, err = answer("train", "-m", *TINY, "seed=1,2")
    assert (code, err.startswith("error: s/report: cannot be ")) == (1, True)
    assert [record(cwd / f"s/{run}")["status"] for run in "01"] == ["finished", "finished"]


def test_a_sweep_that_is_interrupted_reports_what_it_has_and_says_how_it_goes_on(cwd):
    (cwd / "1.does").write_text(f"os.kill({os.getpid()}, 2); hang()")
    code, out, err = answer("train", "-m", *TINY, "seed=1,2,3")
    assert (code, err) == (130, "")
    assert record(cwd / "s/1")["error"] == "stopped by SIGINT"
    assert "3 runs: 1 finished, 1 interrupted, 1 planned" in out
    assert out.splitlines()[-1].endswith(" seed=1,2,3 hydra.sweep.dir=s")


def test_a_signal_during_the_report_of_an_interrupted_sweep_leaves_the_line_that_resumes_it(cwd, monkeypatch):
    def report(sweep):
        raise Interrupted(signal.SIGINT)

    (cwd / "1.does").write_text(f"os.kill({os.getpid()}, 2); hang()")
    monkeypatch.setattr(runner.Sweep, "report", report)
    code, out, _ = answer("train", "-m", *TINY, "seed=1,2,3")
    assert code == 130
    assert out.splitlines()[-1].startswith("resume   ")


def test_a_sweep_with_a_run_that_can_be_resumed_ends_in_the_line_that_resumes_it(cwd):
    (cwd / "1.does").write_text("os.kill(os.getpid(), 9)")
    code, out, _ = answer("train", "-m", *TINY, "seed=1,2")
    assert (code, out.splitlines()[-1].startswith("resume   ")) == (1, True)


@pytest.mark.parametrize("options", ["hydra.launcher._target_=own.Launcher", "experiment=find_batch_size"])
def test_timing_that_is_asked_for_where_runs_follow_each_other_is_said_to_be_missed_once(options, cwd, monkeypatch):
    monkeypatch.setattr("batchscope._hydra.multirun", lambda *_: None)
    monkeypatch.setattr(runner.Loop, "run", lambda *_: None)
    words = ["-m", "seed=1,2"] if "launcher" in options else []
    err = answer("train", *words, *TINY, "timing=true", options).err
    assert err.count("warning: timing=true: not all runs can be timed side by side") == 1


def test_timed_runs_are_visited_and_a_search_recommends_one_of_its_runs(cwd):
    timed = answer("train", "-m", *TINY, "experiment=throughput", "data.batch_size=4,16", "trainer.accelerator=cpu")
    assert timed.code == 0, timed.err
    assert timed.out.startswith("preparing 2 settings\n")
    assert timed.out.partition("\n\n")[2].startswith("2 runs: 2 finished\n")  # what each run prints is left to -v
    assert record(cwd / "s/0")["taken"] == record(cwd / "s/1")["taken"] != []
    search = answer("train", *TINY[:-1], "experiment=find_batch_size", "hydra.sweep.dir=t", "data.num_train=4000")
    assert search.code == 0, search.err
    assert "→" in search.out
    assert sorted(int(path.parent.name) for path in cwd.glob("t/0/*/run.json")) == [8, 32, 128, 512, 2048, 4000]


def test_a_launcher_that_fails_leaves_a_report_and_one_line(cwd, monkeypatch):
    def launch(configs, words, job):
        raise RuntimeError("the job\nis lost")

    assert answer("train", "-m", *TINY, "seed=1,2").code == 0
    monkeypatch.setattr("batchscope._hydra.multirun", launch)
    code, out, err = answer("train", "-m", *TINY, "seed=1,2", "hydra.launcher._target_=own.Launcher")
    assert (code, err) == (1, "error: hydra/launcher: RuntimeError: the job is lost\n")
    assert "2 runs: 2 finished" in out
    assert out.splitlines()[-1].startswith("resume   ")


def test_a_search_by_a_metric_that_no_run_has_ends_with_the_metrics_that_there_are(tmp_path, monkeypatch, capsys):
    run_record = {"status": "finished", "config": {"optimized_metric": "val/accuracy"}, "metrics": {"val/acc": 0.9}}
    hydra = {"job": {"num": 0, "env_set": {}}, "runtime": {"output_dir": str(tmp_path), "choices": {}}}
    hydra |= {"overrides": {"task": []}}
    monkeypatch.setattr(runner.HydraConfig, "get", lambda: OmegaConf.create(hydra))
    line = compose_command_line(["seed=1,2"], multirun=True)
    sweep = runner.Sweep(tmp_path, replace(line, labels=[]))
    monkeypatch.setattr(sweep.loop, "do", lambda jobs: [run_record])
    with pytest.raises(RunFailed):
        sweep.run_job(compose(["optimized_metric=val/accuracy"]))
    assert "optimized_metric: got 'val/accuracy', and " in (errors := capsys.readouterr().err)
    assert errors.endswith(" has val/acc\n") and sweep.exit_code == 1
    run_record["config"]["optimized_metric"] = "val/acc"
    assert sweep.run_job(compose(["optimized_metric=val/acc"])) == 0.9


def test_a_search_without_a_seed_has_no_line_that_resumes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "hydra/sweeper=optuna"])
    line = compose_command_line(["seed=1,2"], multirun=True)
    for seed, begins in ((None, "kept     "), (0, "resume   batchscope train ")):
        composition = OmegaConf.create({"hydra": {"sweeper": {"sampler": {"seed": seed}}}})
        runner.Sweep(tmp_path, replace(line, compositions=[composition])).print_resume()
        assert capsys.readouterr().out.splitlines()[-1].startswith(begins)


def test_a_failure_comes_back_from_another_process():
    """A launcher pickles the failure for a searching sweeper."""
    failed = RunFailed.from_record(job(Path("s"), "0"), {"status": "failed", "error": "a bug"})
    received = pickle.loads(pickle.dumps(failed))
    assert (str(received), received.exit_code, received.reported) == ("s/0: a bug", 1, True)


# --- real runs -------------------------------------------------------------------------------------------------------


def start(cwd, *options, **environ):
    return spawn(cwd, TRAIN, "-m", *TINY, *options, **environ)


def process_of(cwd, run):
    """Return the id of the process that trains in a folder: it has a file of the folder open. None if there is none."""
    folder = f"{(cwd / 's' / run).resolve()}/"
    opened = ((process.pid, process.info["open_files"] or ()) for process in psutil.process_iter(["open_files"]))
    return next((pid for pid, files in opened if any(file.path.startswith(folder) for file in files)), None)


@pytest.mark.slow
@LINUX
def test_a_killed_sweep_ends_its_run_and_resumed_keeps_what_was_finished(tmp_path):
    endless = "trainer.max_epochs=1,1000000"  # the second run continues until it is stopped
    killed = start(tmp_path, endless)
    files = [tmp_path / "s/1" / name for name in ("csv/metrics.csv", "checkpoints/last.ckpt")]
    wait_until(lambda: process_of(tmp_path, "1") and all(file.exists() for file in files), "the run does not start")
    killed.kill()
    killed.communicate()
    wait_until(lambda: not process_of(tmp_path, "1"), "the run outlives its sweep")
    before = (tmp_path / "s/0/run.json").read_bytes()

    resumed = start(tmp_path, endless)
    wait_until(lambda: record(tmp_path / "s/1").get("resumed"), "the run is not resumed")
    assert (tmp_path / "s/0/run.json").read_bytes() == before
    resumed.send_signal(signal.SIGINT)
    code, out, err = end(resumed)
    assert (code, "Traceback" in err) == (130, False)
    assert "— run 1 of 2: trainer.max_epochs=1 — kept\n" in out
    assert "2 runs: 1 finished, 1 interrupted" in out
    assert process_of(tmp_path, "1") is None
    assert [entry["step"] > 0 for entry in record(tmp_path / "s/1")["resumed"]] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["pipeline=memory", "pipeline=workers"])
def test_a_forked_run_ends_in_the_bits_the_memory_and_the_threads_of_a_run_alone(tmp_path, loader):
    options = ["trainer.max_epochs=5", "model.hidden_size=512", f"data.{loader}"]
    code, _, err = end(start(tmp_path, *options, "data.batch_size=64,8"))  # a large run before the one that is compared
    assert code == 0, err
    assert end(spawn(tmp_path, TRAIN, *TINY[:-1], *options, "data.batch_size=8", "hydra.run.dir=alone")).code == 0
    forked, alone = tmp_path / "s/1", tmp_path / "alone"
    assert_alike(results(forked), results(alone))
    assert record(forked)["hardware"] == record(alone)["hardware"]  # it has the number of threads
    peaks = [record(folder)["throughput"]["memory_peak_gib"] for folder in (forked, alone)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


TRAINED = ["data.batch_size=16,32,64", "data.num_train=3072", "trainer.max_epochs=30", "trainer.accelerator=cpu"]


@pytest.mark.slow
@LINUX
def test_a_sweep_of_trainings_is_timed_in_passes_and_trains_what_runs_alone_train(tmp_path):
    code, out, err = end(start(tmp_path, *TRAINED))
    assert code == 0, err
    for n, size in enumerate((16, 32, 64)):
        assert f"\n— run {n + 1} of 3: data.batch_size={size}\n" in out
    passes = [read_step_times(tmp_path / f"s/{n}").pass_ for n in range(3)]
    assert all((of_run >= 0).sum() >= 10 and (of_run[:10] == passes[0][:10]).all() for of_run in passes)
    run_record = record(tmp_path / "s/2")
    files = [EventAccumulator(str(file)).Reload() for file in (tmp_path / "s/2").rglob("events.out*")]
    (curves,) = [file for file in files if card("train/loss") in file.Tags()["scalars"]]
    times = [event.wall_time for event in curves.Scalars(card("train/loss"))]
    assert run_record["waiting_seconds"] > 1 and times[-1] - times[0] < run_record["fit_seconds"]
    plain = end(start(tmp_path, *TRAINED, "timing=false", "hydra.sweep.dir=alone"))
    assert plain.code == 0, plain.err
    for n in range(3):
        assert_alike(results(tmp_path / f"s/{n}"), results(tmp_path / f"alone/{n}"))


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("when", ["in the passes", "after the passes"])
def test_a_sweep_of_trainings_that_is_stopped_goes_on_to_the_same_results(when, number, tmp_path):
    long = [*TRAINED, "callbacks.checkpoint.every_n_steps=20", "data.batch_size=16,32"]
    stopped = start(tmp_path, *long)
    last = tmp_path / "s/0/checkpoints/last.ckpt"
    wait_until(last.exists, "the first run keeps no checkpoint")
    if when == "after the passes":
        wait_until(lambda: record(tmp_path / "s/0")["status"] == "finished", "the first run does not end")
    stopped.send_signal(number)
    stopped.communicate()
    wait_until(lambda: not any(process_of(tmp_path, run) for run in "01"), "a run outlives its sweep")
    code, _, err = end(start(tmp_path, *long))
    assert code == 0, err
    assert any(record(tmp_path / f"s/{n}").get("resumed") for n in range(2))
    assert end(start(tmp_path, *long, "timing=false", "hydra.sweep.dir=alone")).code == 0
    for n in range(2):
        assert_alike(results(tmp_path / f"s/{n}"), results(tmp_path / f"alone/{n}"))


SHORT = ["trainer.max_epochs=-1", "data.num_train=400", "callbacks.until_known.seconds=1"]
# An experiment and its options → whether its runs share passes, and text in its output.
REAL = {
    "throughput": (["-m", "data.batch_size=4,16", "trainer.max_epochs=-1"], True, "2 runs: 2 finished"),
    "find_batch_size": (["search.max_runs=3", "data.num_train=20000"], False, "→"),
    "diagnose": ([*SHORT, "trainer.precision=32-true"], True, "÷ first"),
    "time_to_target": (["target=0.5", "target_metric=val/loss", "search.sizes=[8,64]", "search.rates=[1]"], False, "— run 2 of at most 2: "),
}  # fmt: skip


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("experiment", REAL)
def test_real_runs_end_in_an_answer_and_are_kept(experiment, tmp_path):
    options, visited, recommendation = REAL[experiment]
    words = [f"experiment={experiment}", *options, "trainer.accelerator=cpu"]
    for again in (False, True):
        code, out, err = end(spawn(tmp_path, TRAIN, *TINY, *words))
        assert code == 0, err
        assert recommendation in out
        runs = [path.parent for path in (tmp_path / "s").rglob("run.json")]
        assert {record(folder)["status"] for folder in runs} == {"finished"}
        assert out.count(" — kept") == (len(runs) if again else 0)
    if visited:
        passes = Counter(number for folder in runs for number in {*read_step_times(folder).pass_.tolist()} - {-1})
        assert sum(runs_in_pass > 1 for runs_in_pass in passes.values()) >= 3


# --- launchers and searching sweepers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "hydra/launcher=submitit_local",
        "hydra/launcher=ray hydra.launcher.ray.init.num_cpus=2",
        "hydra/launcher=joblib hydra.launcher.n_jobs=2",
        "hydra/sweeper=optuna hydra.sweeper.n_trials=3 hydra.sweeper.n_jobs=1 hydra.sweeper.direction=minimize",
    ],
)
def test_a_sweep_of_a_plugin_ends_in_its_report_and_exit_code(options, tmp_path):
    kind, plugin = re.match(r"hydra/(\w+)=([a-z]+)", options).groups()
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_{kind}")
    searches = kind == "sweeper"
    statuses = "3 runs: 3 finished" if searches else "2 runs: 1 failed, 1 finished"
    varied = "optimizer.lr=interval(1e-4,1e-1)" if searches else "trainer.max_epochs=-1,1"  # the schedule refuses -1
    code, out, err = end(start(tmp_path, *options.split(), varied))
    assert (code, statuses in out) == (int(not searches), True), err
    assert ".submitit" not in (tmp_path / "s/report/report.md").read_text()
    if searches:
        records = [record(tmp_path / "s" / str(run)) for run in range(3)]
        assert len({run_record["config"]["optimizer"]["lr"] for run_record in records}) == 3
        best = OmegaConf.load(tmp_path / "s/optimization_results.yaml").best_value
        assert best == pytest.approx(min(run_record["metrics"]["val/loss"] for run_record in records))


@pytest.mark.slow
@LINUX
def test_slurm_starts_a_preempted_job_again_asked_once_and_the_run_resumes(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    twins = ["seed=0,0", "data.num_train=1000", "data.batch_size=4", "trainer.max_epochs=2", "optimizer.lr=0.001"]
    twins += ["callbacks.checkpoint.every_n_steps=50", "callbacks.device=null", "hydra/launcher=submitit_slurm"]
    process = start(tmp_path, *twins, "hydra.launcher.partition=gpu", **install(tmp_path / "slurm"))
    wait_until((tmp_path / "s/1/checkpoints/last.ckpt").exists, "the run keeps no checkpoint")
    run = psutil.Process(process_of(tmp_path, "1"))
    for notified in (run.parent(), run):  # the task of the job; some clusters tell all processes of a job
        notified.send_signal(signal.SIGUSR2)
    code, out, err = end(process)
    assert code == 0, err
    assert "2 runs: 2 finished" in out
    assert (tmp_path / "slurm/state/requeued").read_text() == "1000_1\n"
    script = (tmp_path / "slurm/state/1000.sh").read_text().splitlines()
    assert {f"#SBATCH --{option}" for option in ("partition=gpu", "signal=USR2@120", "requeue", "nodes=1")} <= {*script}
    unpreempted, again = (record(tmp_path / "s" / run) for run in "01")
    assert "resumed" not in unpreempted
    assert 0 < again["resumed"][0]["step"] < again["steps"] == unpreempted["steps"] == 500
    assert_alike(results(tmp_path / "s/1"), results(tmp_path / "s/0"))
