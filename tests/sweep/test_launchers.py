"""What a launcher needs is said in one line before anything is started, and where its runs will be is known."""

import pytest

from batchscope.errors import UserError
from batchscope.options.compose import compose_command_line
from batchscope.sweep import launchers


def node(choice: str, *overrides: str) -> dict:
    return compose_command_line([f"hydra/launcher={choice}", *overrides, "seed=0,1"], multirun=True).launcher


def installed(monkeypatch: pytest.MonkeyPatch, is_so: bool) -> None:
    monkeypatch.setattr(launchers, "_is_installed", lambda module: is_so)


@pytest.mark.parametrize(
    ("choice", "extra"), [("submitit_slurm", "slurm"), ("submitit_local", "slurm"), ("ray", "ray")]
)
def test_a_missing_plugin_is_named_with_the_extra_that_installs_it(monkeypatch, choice: str, extra: str) -> None:
    installed(monkeypatch, False)
    with pytest.raises(UserError, match=rf"is not installed; pip install 'batchscope\[{extra}\]'"):
        launchers.check_launcher(node(choice))


def test_a_machine_that_cannot_submit_jobs_is_told_what_is_missing(monkeypatch, tmp_path) -> None:
    installed(monkeypatch, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="submitit_slurm needs sbatch, srun, scontrol, sacct, which"):
        launchers.check_launcher(node("submitit_slurm"))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["nodes", "tasks_per_node"])
def test_several_tasks_for_a_run_are_refused(monkeypatch, option: str) -> None:
    installed(monkeypatch, True)
    with pytest.raises(UserError, match=rf"hydra\.launcher\.{option}: got 2, takes 1"):
        launchers.check_launcher(node("submitit_local", f"hydra.launcher.{option}=2"))


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
    assert launchers.runs_here(node(*options.split())) is here
