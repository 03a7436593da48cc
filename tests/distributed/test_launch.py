"""The processes that were started are checked before torch is imported; launched processes make one run."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchscope.distributed.launch import check_processes
from batchscope.hardware.devices import check_accelerator
from batchscope.ranks import Rank, current
from tests.support.command_lines import refusal
from tests.support.spawned import TRAIN, end, spawn

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
}


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
    assert current(environ) == rank


@pytest.mark.parametrize(
    "trainer",
    [
        {"devices": "auto"},
        {"devices": -1, "accelerator": "gpu"},
        {"devices": [0, 2], "accelerator": "gpu"},
        {"devices": "0,2", "accelerator": "auto"},
        {"devices": 2, "strategy": "ddp", "accelerator": "cpu", "num_nodes": 1},
        {"strategy": "deepspeed_stage_2", "accelerator": "gpu", "devices": 2},
        {"strategy": {"_target_": "lightning.pytorch.strategies.DDPStrategy", "start_method": "popen"}},
    ],
)
def test_what_lightning_can_do_alone_is_let_through(trainer: dict) -> None:
    check_processes(trainer, environ={})


def test_as_many_processes_as_asked_for_are_let_through() -> None:
    for environ in (TORCHRUN, SRUN):
        check_processes({"devices": 2, "num_nodes": 2, "strategy": "ddp"}, environ=environ)


@pytest.mark.parametrize(
    ("trainer", "environ", "line"),
    [
        ({"devices": 0}, {}, "trainer.devices: got 0, takes a number of devices (at least 1)"),
        ({"devices": -2}, {}, "trainer.devices: got -2, takes a number of devices"),
        ({"devices": "abc"}, {}, "trainer.devices: got 'abc', takes a number of devices"),
        ({"devices": "atuo"}, {}, "Did you mean 'auto'?"),
        ({"devices": []}, {}, "trainer.devices: got [], takes"),
        ({"devices": [0, "x"]}, {}, "trainer.devices: got [0, 'x'], takes"),
        ({"devices": True}, {}, "trainer.devices: got True, takes"),
        ({"devices": -1, "accelerator": "cpu"}, {}, "takes a number of processes on the CPU"),
        ({"devices": [0, 1], "accelerator": "cpu"}, {}, "takes a number of processes on the CPU"),
        ({"num_nodes": 0}, {}, "trainer.num_nodes: got 0, takes"),
        ({"num_nodes": 2}, {}, "trainer.num_nodes: got 2, and nothing has started this on 2 machines"),
        ({"strategy": "dpp"}, {}, "trainer.strategy: got dpp, takes auto, single_device, ddp, "),
        ({"strategy": "dpp"}, {}, "Did you mean 'ddp'?"),
        ({"strategy": "fsdp2"}, {}, "Did you mean 'fsdp'?"),
        ({"strategy": "ddp_spawn"}, {}, "trainer.strategy: got ddp_spawn, takes auto, single_device, ddp, "),
        ({"devices": 1}, TORCHRUN, "1 on each of 1 machine make 1 process, and torchrun has started 4"),
        ({"devices": 2}, SRUN, "2 on each of 1 machine make 2 processes, and srun has started 4"),
        ({"devices": 4}, {k: v for k, v in SRUN.items() if "STEP" not in k}, "write srun batchscope train"),
        ({"devices": 4}, {k: v for k, v in SRUN.items() if "PER_NODE" not in k}, "--ntasks-per-node"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(trainer: dict, environ: dict[str, str], line: str) -> None:
    assert line in refusal(check_processes, trainer, environ=environ)


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_accelerator("gpu", 1)
    assert refusal(check_accelerator, "gpu", 4) == "trainer.devices: got 4, and this machine has 1 GPU"


def test_a_sweep_is_not_started_by_torchrun() -> None:
    said = refusal(check_processes, {"devices": 4}, multirun=True, environ=TORCHRUN)
    assert "a sweep starts the processes of its runs itself" in said


# --- started by others ------------------------------------------------------------------------------------------------

# Without the rendezvous every process would choose a folder of its own, by its clock and its number.
OWN_FOLDER = "hydra.run.dir=out/${now:%H-%M-%S-%f}-${oc.env:MINE}"
SMALL = ["data=adding", "data.num_train=64", "data.num_val=16", "data.num_test=16", "data.batch_size=4", OWN_FOLDER]
SMALL += ["model=rnn_cell", "callbacks.throughput.calibrate=false", "callbacks.progress=null", "callbacks.device=null"]
SMALL += ["trainer.max_epochs=1", "trainer.accelerator=cpu", "trainer=ddp"]


def torchrun(folder: Path, *words: str, agent: int = 0, port: int | None = None) -> subprocess.Popen[str]:
    """`torchrun --nproc_per_node=2`; with a port, one of two agents as on two machines."""
    where = ["--standalone", "--nproc_per_node=2"]
    if port:
        where = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
        where.append(f"--node_rank={agent}")
    launcher = ["-m", "torch.distributed.run", *where]
    return spawn(folder, *launcher, TRAIN, *SMALL, *words, MINE=str(agent))


def srun(folder: Path, task: int, port: int, *words: str) -> subprocess.Popen[str]:
    """A task as SLURM's srun starts it, with the variables that Lightning and batchscope read."""
    slurm = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "PROCID": task, "LOCALID": task, "NODEID": 0, "NNODES": 1, "JOB_ID": 7}
    slurm |= {"NODELIST": "127.0.0.1", "JOB_NAME": "train", "STEP_ID": 0, "STEP_NUM_TASKS": 2}
    environ = {f"SLURM_{key}": str(value) for key, value in slurm.items()}
    return spawn(folder, TRAIN, *SMALL, *words, **environ, MASTER_PORT=str(port), MINE=str(task))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def the_only_record(folder: Path, processes: list[subprocess.Popen[str]]) -> dict:
    """Two ranks leave one folder, one record and one set of logs, and only rank 0 prints."""
    ended = [end(process) for process in processes]
    assert not any(one.code for one in ended), ended
    said = "".join(one.out for one in ended)
    assert said.count("\nresult  ") == said.count(" parameters) on ") == 1
    (run_dir,) = (folder / "out").iterdir()
    assert len(list(run_dir.glob("rnn-cell-*"))) == len(list(run_dir.glob("csv/*.csv"))) == 1
    record = json.loads((run_dir / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["processes"] == 2
    assert record["global_batch_size"] == 8
    assert record["steps"] == 8
    return record


def by_torchrun(folder: Path) -> list[subprocess.Popen[str]]:
    return [torchrun(folder, "trainer.devices=2")]


def by_two_torchruns(folder: Path) -> list[subprocess.Popen[str]]:
    port, options = free_port(), ("trainer.devices=1", "trainer.num_nodes=2")
    return [torchrun(folder, *options, agent=agent, port=port) for agent in (0, 1)]


def by_srun(folder: Path) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [srun(folder, task, port, "trainer.devices=2") for task in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("started", [by_torchrun, by_two_torchruns, by_srun])
def test_processes_that_others_start_leave_one_record(started, tmp_path):
    the_only_record(tmp_path, started(tmp_path))


@pytest.mark.slow
def test_torchrun_starts_processes_again_that_have_failed(tmp_path: Path) -> None:
    """Rank 1 fails once, after the rendezvous: at the end of the first attempt's epoch."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from batchscope import train\nfrom batchscope.training import task\n"
        "def fail(*_):\n"
        "    raise RuntimeError('an attempt that fails')\n"
        "if (os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']) == ('0', '1'):\n"
        "    task.Task.on_train_epoch_end = fail\n"
        "train.main()\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    done = end(spawn(tmp_path, *launcher, str(program), *SMALL, "trainer.devices=2", MINE="0"))
    assert done.code == 0, done.err
    assert done.out.count("\nresult  ") == 1
    records = [json.loads((run / "run.json").read_text()) for run in sorted((tmp_path / "out").iterdir())]
    assert [record["status"] for record in records] == ["failed", "finished"]


@pytest.mark.slow
def test_a_mistake_on_torchruns_command_line_is_printed_once(tmp_path: Path) -> None:
    done = end(torchrun(tmp_path, "trainer.devices=2", "data.batch_sise=3"))
    assert done.code != 0
    assert done.err.count("error: ") == done.err.count("error: data.batch_sise: no such option") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rank_with_other_options_is_named(tmp_path: Path) -> None:
    port = free_port()
    options = [("optimizer.lr=0.1",), ("optimizer.lr=0.2",)]
    processes = [srun(tmp_path, task, port, "trainer.devices=2", *options[task]) for task in (0, 1)]
    ended = [end(process) for process in processes]
    assert [one.code for one in ended] == [1, 1]
    (line,) = [line for one in ended for line in one.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: optimizer.lr: is 0.2 in process 1 (on ")
    assert line.endswith("and 0.1 in process 0")
    (run_dir,) = (tmp_path / "out").iterdir()
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_rank_with_other_data_is_named(tmp_path: Path) -> None:
    """The command lines agree, but `data.root` holds other digits on one of the machines."""
    other = [str(tmp_path / str(task)) for task in (0, 1)]
    render = "from batchscope.data.digits import *; from pathlib import Path; import sys, torch\n"
    render += "for s, n in enumerate((64, 16, 16)): torch.save(render_digits(n, 9), Path(sys.argv[1]) / f'v{VERSION}-{n}-{s}.pt')"
    (tmp_path / "1" / "digits").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", render, str(tmp_path / "1" / "digits")], check=True)
    port = free_port()
    options = ["trainer.devices=2", "data=digits", "model=mlp"]
    processes = [srun(tmp_path, task, port, *options, f"data.root={other[task]}") for task in (0, 1)]
    ended = [end(process) for process in processes]
    complained = "".join(one.err for one in ended)
    assert [one.code for one in ended] == [1, 1]
    assert complained.count("error: ") == complained.count("error: dataset.fingerprint: is ") == 1
