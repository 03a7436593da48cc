"""Sweeps whose runs are jobs: of submitit on this machine, of a SLURM that starts jobs at once, of Ray."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import fake_slurm as slurm
from tests.support.runs import assert_alike, results
from tests.support.spawned import ROOT, end
from tests.support.waiting import wait_until
from tests.sweep.test_runner import TINY, linux, process_of, record, start

SHORT = ["trainer.max_epochs=-1,1"]  # the first of two runs is refused by its schedule
# Two runs of one configuration, of some seconds each: what is done to one of them must not show.
TWINS = ["seed=0,0", "data.num_train=1000", "data.batch_size=4", "trainer.max_epochs=2", "optimizer.lr=0.001"]
TWINS += ["callbacks.checkpoint.every_n_steps=50", "callbacks.device=null"]


@pytest.fixture
def submitit() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"{path} never came")


def task_of(cwd: Path, run: str) -> psutil.Process:
    """The task of the job that a run is in, once the run has kept a checkpoint."""
    wait_for(cwd / "s" / run / "checkpoints/last.ckpt")
    return psutil.Process(process_of(cwd, run)).parent()


def assert_resumed_as_if_never_stopped(cwd: Path) -> None:
    assert "resumed" not in record(cwd, "0")
    (resumption,) = record(cwd, "1")["resumed"]
    assert 0 < resumption["step"] < record(cwd, "1")["steps"] == record(cwd, "0")["steps"] == 500
    assert_alike(results(cwd / "s/1"), results(cwd / "s/0"))


@pytest.mark.slow
def test_a_sweep_of_submitit_on_this_machine_ends_in_its_report_and_exit_code(tmp_path: Path, submitit: None) -> None:
    process = start(tmp_path, "hydra/launcher=submitit_local", *SHORT)
    code, out, err = end(process)
    assert code == 1, err
    assert out.startswith("the runs are jobs, and write their output to s/.submitit\n")
    assert "2 runs: 1 failed, 1 finished" in out
    assert ".submitit" not in (tmp_path / "s/report/report.md").read_text()
    assert record(tmp_path, "0")["error"].startswith("optimizer.schedule: one_cycle needs an end")


@pytest.mark.slow
@linux
def test_a_job_that_is_killed_is_one_line_and_the_other_runs_are_reported(tmp_path: Path, submitit: None) -> None:
    process = start(tmp_path, "hydra/launcher=submitit_local", *TWINS)
    task_of(tmp_path, "1").kill()
    code, out, err = end(process)
    assert code == 1
    assert err.count("error: hydra/launcher: Job ") == 1
    assert "Traceback" not in err
    assert "2 runs: 1 finished, 1 interrupted" in out
    assert process_of(tmp_path, "1") is None


@pytest.mark.slow
@linux
def test_slurm_starts_a_preempted_job_again_asked_once_and_the_run_resumes(tmp_path: Path, submitit: None) -> None:
    environment = slurm.install(tmp_path / "slurm")
    process = start(tmp_path, "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", *TWINS, **environment)
    task = task_of(tmp_path, "1")
    for told in (task, psutil.Process(process_of(tmp_path, "1"))):  # some clusters tell all processes of a job
        told.send_signal(signal.SIGUSR2)
    code, out, err = end(process)
    assert code == 0, err
    assert "2 runs: 2 finished" in out
    assert slurm.requeued(tmp_path / "slurm") == ["1000_1"]
    assert {"--partition=gpu", "--signal=USR2@120", "--requeue", "--nodes=1"} <= set(slurm.script(tmp_path / "slurm"))
    assert_resumed_as_if_never_stopped(tmp_path)


@pytest.mark.slow
@linux
def test_a_job_of_slurm_trains_on_several_devices_with_processes_of_its_own(tmp_path: Path, submitit: None) -> None:
    environment = slurm.install(tmp_path / "slurm")
    several = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=4"]
    process = start(tmp_path, "hydra/launcher=submitit_slurm", *several, **environment)
    code, out, err = end(process)
    assert code == 0, err
    assert "1 finished" in out
    assert record(tmp_path, "0")["throughput"]["processes"] == 2


@pytest.mark.slow
@linux
def test_the_script_for_one_run_is_started_again_by_slurm_and_goes_on(tmp_path: Path) -> None:
    programs = slurm.install(tmp_path / "slurm")["PATH"]
    path = f"{Path(sys.executable).parent}:{programs}"  # as with an activated environment
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    options = [word for word in [*TINY, *TWINS] if not word.startswith(("hydra", "seed"))]
    subprocess.run(["sbatch", str(ROOT / "docs/train.sbatch"), *options], cwd=tmp_path, env=environment, check=True)
    run_dir = tmp_path / "outputs/runs/1000"
    wait_for(run_dir / "checkpoints/last.ckpt")
    lines = {p: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}  # None of a process that has ended
    (task,) = [p for p, words in lines.items() if "hydra.run.dir=outputs/runs/1000" in words]
    task.send_signal(signal.SIGUSR1)
    wait_until(lambda: json.loads((run_dir / "run.json").read_text())["status"] == "finished", "the job does not end")
    assert slurm.requeued(tmp_path / "slurm") == ["1000"]
    (resumption,) = json.loads((run_dir / "run.json").read_text())["resumed"]
    assert resumption["step"] > 0


@pytest.mark.slow
def test_a_sweep_of_ray_ends_in_its_report_and_exit_code(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    process = start(tmp_path, "hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2", *SHORT)
    code, out, err = end(process)
    assert code == 1, err
    assert "2 runs: 1 failed, 1 finished" in out
