"""The processes that were started are checked before torch is imported; launched processes make one run."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from batchscope.cli.train import _check_processes
from batchscope.hardware.devices import check_accelerator
from batchscope.ranks import Rank, current_rank
from tests.support.command_lines import refusal
from tests.support.spawned import TRAIN, end, free_port, spawn

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
SRUN |= {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train"}


def started_by(environ: dict[str, str]):
    """Replace the whole environment within the block."""
    return mock.patch.dict(os.environ, environ, clear=True)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, Rank("", 0, 1)),
        ({"LOCAL_RANK": "1"}, Rank("", 1, 1)),  # Lightning has started it
        (TORCHRUN, Rank("torchrun", 3, 4)),
        (SRUN, Rank("srun", 2, 4)),
        ({**SRUN, **TORCHRUN}, Rank("torchrun", 3, 4)),  # srun has started torchrun
        ({**SRUN, "SLURM_JOB_NAME": "interactive"}, Rank("", 0, 1)),  # a shell within a job
    ],
)
def test_a_process_knows_its_number_and_who_has_started_it(environ: dict[str, str], rank: Rank) -> None:
    with started_by(environ):
        assert current_rank() == rank


DDP = "lightning.pytorch.strategies.DDPStrategy"
# The options of a trainer, the environment of its launcher, and the message of a refusal, if any.
TRAINERS: list[tuple[dict, dict[str, str], str]] = [
    ({"devices": "auto"}, {}, ""),
    *(({"devices": devices, "accelerator": "gpu"}, {}, "") for devices in (-1, [0, 2], "0,2")),
    ({"devices": 2, "strategy": "ddp", "accelerator": "cpu", "num_nodes": 1}, {}, ""),
    ({"strategy": "deepspeed_stage_2", "accelerator": "gpu", "devices": 2}, {}, ""),
    ({"strategy": {"_target_": DDP, "start_method": "popen"}}, {}, ""),
    *(({"devices": 2, "num_nodes": 2, "strategy": "ddp"}, launcher, "") for launcher in (TORCHRUN, SRUN)),
    ({"num_nodes": 2}, {}, "trainer.num_nodes: got 2, and nothing has started this on 2 machines"),
    ({"devices": 1}, TORCHRUN, "got 1 with trainer.num_nodes=1, and torchrun has started 4 processes"),
    ({"devices": 2}, SRUN, "got 2 with trainer.num_nodes=1, and this job of SLURM has 4 tasks; write trainer=ddp"),
    ({"devices": 2}, SRUN, "started by srun, or take a job of one task (--ntasks=1)"),
]


@pytest.mark.parametrize(("trainer", "environ", "reason"), TRAINERS)
def test_more_or_fewer_processes_than_the_options_ask_for_are_one_line(trainer, environ, reason) -> None:
    with started_by(environ):
        if reason:
            assert reason in refusal(_check_processes, trainer)
        else:
            _check_processes(trainer)


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        *((name, name) for name in ("ddp_fork", "ddp_notebook", "ddp_spawn", "ddp_fork_find_unused_parameters_true")),
        *(({"_target_": DDP, "start_method": method}, f"ddp_{method}") for method in ("fork", "forkserver", "spawn")),
    ],
)
def test_a_strategy_that_trains_in_other_processes_than_this_is_refused(strategy: Any, named: str) -> None:
    with started_by({}):
        line = refusal(_check_processes, {"devices": 2, "strategy": strategy})
        for accepted in ("ddp", "fsdp", {"_target_": DDP}, {"_target_": DDP, "start_method": "popen"}):
            _check_processes({"devices": 2, "strategy": accepted})
    assert line.startswith(f"trainer.strategy: {named} trains in processes whose results do not come back to this one")


@pytest.mark.parametrize(("environ", "advice"), [
    (TORCHRUN, "torchrun has started 4 processes; write batchscope train -m … alone"),
    (SRUN, "this job of SLURM has 4 tasks; take a job of one task (--ntasks=1)"),
])  # fmt: skip
def test_a_sweep_in_processes_that_others_have_started_is_refused(environ: dict[str, str], advice: str) -> None:
    with started_by(environ):
        message = refusal(_check_processes, {"devices": 4}, multirun=True)
    assert message == f"a sweep starts the processes of its runs itself, and {advice}"


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_accelerator({"trainer": {"accelerator": "gpu", "devices": 1}})
    config = {"trainer": {"accelerator": "gpu", "devices": 4}}
    assert refusal(check_accelerator, config) == "trainer.devices: got 4, and this machine has 1 GPU"


# --- started by others ------------------------------------------------------------------------------------------------

# Without the rendezvous every process would choose a folder of its own, by its clock and its number.
TWO = ["hydra.run.dir=out/${now:%H-%M-%S-%f}-${oc.env:MINE}", "trainer=ddp", "trainer.accelerator=cpu"]
TWO += ["data=adding", "data.num_train=64", "data.num_val=16", "data.num_test=16", "data.batch_size=4"]
TWO += ["model=rnn_cell", "callbacks.throughput.calibrate=false", "callbacks.progress=null", "callbacks.device=null"]
TWO += ["trainer.max_epochs=1", "trainer.devices=2"]
TORCH = ["-m", "torch.distributed.run"]


def by_lightning(folder: Path) -> list[subprocess.Popen[str]]:
    return [spawn(folder, TRAIN, *TWO, MINE="0")]


def by_torchrun(folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    return [spawn(folder, *TORCH, "--standalone", "--nproc_per_node=2", TRAIN, *TWO, *words, MINE="0")]


def by_two_torchruns(folder: Path) -> list[subprocess.Popen[str]]:
    """Start one torchrun for each of two simulated machines."""
    launcher = [*TORCH, "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    words = [TRAIN, *TWO, "trainer.devices=1", "trainer.num_nodes=2"]
    return [spawn(folder, *launcher, f"--node_rank={agent}", *words, MINE=str(agent)) for agent in (0, 1)]


def by_srun(folder: Path) -> list[subprocess.Popen[str]]:
    """Two tasks as SLURM's srun starts them, with the variables that Lightning and batchscope read."""
    slurm = SRUN | {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
    slurm |= {"SLURM_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": str(free_port())}
    environments = ({"SLURM_PROCID": task, "SLURM_LOCALID": task, "MINE": task} for task in "01")
    return [spawn(folder, TRAIN, *TWO, **slurm | variables) for variables in environments]


@pytest.mark.slow
@pytest.mark.parametrize("started", [by_lightning, by_torchrun, by_two_torchruns, by_srun])
def test_two_processes_leave_one_record_of_both_and_only_the_first_prints(started, tmp_path):
    ended = [end(process) for process in started(tmp_path)]
    assert not any(result.code for result in ended), ended
    output = "".join(result.out for result in ended)
    assert output.count("\nresult  ") == output.count(" parameters) on ") == 1
    (run_dir,) = (tmp_path / "out").iterdir()
    assert len(list(run_dir.glob("rnn-cell-*"))) == len(list(run_dir.glob("csv/*.csv"))) == 1
    record = json.loads((run_dir / "run.json").read_text())
    totals = [record[key] for key in ("status", "processes", "global_batch_size", "steps")]
    assert totals == ["finished", 2, 8, 8]  # 64 samples, 4 in each of two processes
    throughput = record["throughput"]  # of both ranks' samples, in the time of this rank's steps
    assert all(len(of_ranks) == 2 and min(of_ranks) > 0 for of_ranks in throughput["ranks_ms"].values())
    assert throughput["samples_per_sec"] == pytest.approx(8e3 / throughput["step_ms_median"])
    assert throughput["samples_per_sec_mean"] == pytest.approx(2 * throughput["samples"] / throughput["seconds"])


@pytest.mark.slow
def test_a_mistake_on_torchruns_command_line_is_printed_once(tmp_path: Path) -> None:
    result = end(*by_torchrun(tmp_path, "data.batch_sise=3"))
    assert result.code != 0
    assert result.err.count("error: ") == result.err.count("error: data.batch_sise: no such option") == 1
    assert not list(tmp_path.iterdir())
