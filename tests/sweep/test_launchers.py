"""Launchers and searching sweepers: what they need, and sweeps whose runs are jobs of submitit, Ray or joblib."""

from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from batchscope.options.compose import compose_command_line
from batchscope.sweep import launchers
from tests.support.command_lines import refusal
from tests.support.runs import record
from tests.support.spawned import end
from tests.support.waiting import wait_until
from tests.sweep.test_runner import linux, process_of, start, sweep


def node(options: str) -> dict:
    return compose_command_line(
        [f"hydra/launcher={options}".split()[0], *options.split()[1:], "seed=0,1"], True
    ).launcher


# Options, whether plugins are installed → the refusal.
NEEDS = [
    ("submitit_slurm", False, "is not installed; pip install 'batchscope[slurm]'"),
    ("ray", False, "is not installed; pip install 'batchscope[ray]'"),
    ("submitit_slurm", True, "submitit_slurm needs sbatch, srun, scontrol, sacct, which"),
    ("submitit_local hydra.launcher.nodes=2", True, "hydra.launcher.nodes: got 2, takes 1"),
    ("submitit_local hydra.launcher.tasks_per_node=2", True, "hydra.launcher.tasks_per_node: got 2, takes 1"),
]


@pytest.mark.parametrize(("options", "is_installed", "said"), NEEDS)
def test_what_is_missing_is_said_before_anything_is_started(options, is_installed, said, monkeypatch, tmp_path) -> None:
    launcher = node(options)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module if is_installed else None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert said in refusal(launchers.check_launcher, launcher)


@pytest.mark.parametrize(
    ("options", "here"),
    [
        ("basic", True),
        ("submitit_local", True),
        ("submitit_slurm", False),
        ("ray", True),
        ("ray hydra.launcher.ray.init.address=auto", False),
    ],
)
def test_devices_are_looked_for_only_where_the_runs_will_be(options: str, here: bool) -> None:
    assert launchers.runs_here(node(options)) is here


# --- sweeps ----------------------------------------------------------------------------------------------------------


def needs(plugin: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        ("submitit_launcher", ["hydra/launcher=submitit_local"]),
        ("ray_launcher", ["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2"]),
        ("joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
    ],
)
def test_a_sweep_of_a_launcher_ends_in_its_report_and_exit_code(
    plugin: str, options: list[str], tmp_path: Path
) -> None:
    needs(plugin)
    code, out, err = sweep(tmp_path, *options, "trainer.max_epochs=-1,1")  # the first is refused by its schedule
    assert code == 1, err
    jobs = "the runs are jobs, and write their output to s/.submitit\n"
    assert out.startswith(jobs) is (plugin == "submitit_launcher")
    assert "2 runs: 1 failed, 1 finished" in out
    assert ".submitit" not in (tmp_path / "s/report/report.md").read_text()
    assert record(tmp_path / "s/0")["error"].startswith("optimizer.schedule: one_cycle needs an end")


@pytest.mark.slow
def test_a_searching_sweeper_gets_its_metric(tmp_path: Path) -> None:
    needs("optuna_sweeper")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    code, out, err = sweep(tmp_path, *search, "optimizer.lr=interval(1e-4,1e-1)")
    assert code == 0, err
    assert "3 runs: 3 finished" in out
    records = [record(tmp_path / "s" / str(run)) for run in range(3)]
    rates = {one["config"]["optimizer"]["lr"] for one in records}
    assert len(rates) == 3 and all(1e-4 <= rate <= 1e-1 for rate in rates)
    found = OmegaConf.load(tmp_path / "s/optimization_results.yaml")
    assert found.best_value == pytest.approx(min(one["metrics"]["val/loss"] for one in records))


@pytest.mark.slow
@linux
def test_a_job_that_is_killed_is_one_line_and_the_other_runs_are_reported(tmp_path: Path) -> None:
    needs("submitit_launcher")
    long = ["seed=0,0", "data.num_train=1000", "data.batch_size=4", "trainer.max_epochs=2"]
    process = start(tmp_path, "hydra/launcher=submitit_local", *long, "callbacks.checkpoint.every_n_steps=50")
    wait_until((tmp_path / "s/1/checkpoints/last.ckpt").exists, "the run keeps no checkpoint")
    psutil.Process(process_of(tmp_path, "1")).parent().kill()  # the task of the job
    code, out, err = end(process)
    assert (code, err.count("error: hydra/launcher: Job "), "Traceback" in err) == (1, 1, False)
    assert "2 runs: 1 finished, 1 interrupted" in out
    assert process_of(tmp_path, "1") is None
