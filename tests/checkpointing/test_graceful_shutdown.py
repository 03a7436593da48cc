"""On a termination signal a run finishes its step, saves a checkpoint, prints how to resume, and ends."""

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lightning
import pytest
import torch

from batchscope.checkpointing.graceful_shutdown import GracefulShutdown
from batchscope.errors import Interrupted
from tests.support.runs import SMALL, Run, assert_alike, last, record, results, run
from tests.support.waiting import PATIENCE_S, wait_until

OUT = "hydra.run.dir=out"
STEP, VALIDATION, TEST = (f"batchscope.training.task.Task.{kind}_step" for kind in ("training", "validation", "test"))
SAVE = "batchscope.checkpointing.checkpoint_file.AtomicCheckpointIO.save_checkpoint"
LOAD = "batchscope.data.copy_memory.CopyMemory.load"


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def requeue() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def ignore_hang_ups() -> None:
    """What nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def both(first: Callable[[], None]) -> None:
    first()
    time.sleep(0.4)
    hang_up()


class Terminal:
    """The terminal of a process's session, which is closed while the process runs."""

    master = -1

    @classmethod
    def open(cls) -> None:
        os.setsid()
        cls.master, slave = os.openpty()
        name = os.ttyname(slave)
        os.close(slave)
        slave = os.open(name, os.O_RDWR)  # the first terminal that a session opens becomes its own
        for stream in (0, 1, 2):
            os.dup2(slave, stream)
        os.close(slave)

    @classmethod
    def close(cls) -> None:
        os.close(cls.master)


def interrupt_and_hang() -> None:
    """Ctrl-C in a step that does not end."""
    interrupt()
    Path("hangs").touch()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("told", "name", "code"),
    [
        (terminate, "SIGTERM", 143),
        # The tests of a terminal that closes, of a line that resumes, and of SLURM send the others.
        pytest.param(interrupt, "SIGINT", 130, marks=pytest.mark.slow),
        pytest.param(hang_up, "SIGHUP", 129, marks=pytest.mark.slow),
        pytest.param(requeue, "SIGUSR1", 138, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_step_lets_it_finish_and_keeps_it(told: object, name: str, code: int, tmp_path: Path) -> None:
    stopped = run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, told)])
    assert stopped.end() == code
    assert stopped.complained == ""
    assert stopped.said.splitlines()[-3:] == [
        f"stopped by {name}",
        "kept     out/checkpoints/last.ckpt",
        "resume   python train.py resume=out",
    ]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["loop_state"]["steps"] == 7


def test_a_run_outlives_its_terminal_until_its_step_is_kept(tmp_path: Path) -> None:
    """Writing to a closed terminal is an error; the progress bar and the last lines do so."""
    with_bar = [word for word in SMALL if word != "callbacks.progress=null"]
    faults = [("batchscope.training.run.train", 1, Terminal.open), (STEP, 7, Terminal.close)]
    stopped = run(tmp_path, *with_bar, "+callbacks.progress.interval_s=1e-9", OUT, faults=faults)
    assert stopped.end() == 129
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["loop_state"]["steps"] == 7


@pytest.mark.slow
def test_nohup_is_respected(tmp_path: Path) -> None:
    faults = [("batchscope.training.run.train", 1, ignore_hang_ups), (STEP, 7, hang_up)]
    assert run(tmp_path, *SMALL, OUT, faults=faults).end() == 0
    assert record(tmp_path / "out")["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [hang_up, terminate], ids=["SIGHUP", "SIGTERM"])
def test_a_hang_up_after_a_signal_is_not_impatience(sent: Callable[[], None], tmp_path: Path) -> None:
    """When a terminal closes, both the system and the shell send SIGHUP; systemd sends it after SIGTERM."""
    faults = [(STEP, 7, partial(both, sent))]
    assert run(tmp_path, *SMALL, OUT, faults=faults).end() in (129, 143)
    assert last(tmp_path / "out")["loop_state"]["steps"] == 7


class Validated(lightning.LightningModule):
    """A module that is not batchscope's, and gets SIGTERM in its second batch of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
        self.batches: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.batches.append(batch_idx)
        if batch_idx == 1:
            terminate()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


class Stream(torch.utils.data.IterableDataset):
    """A dataset of unknown length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(9, 1))


def test_a_validation_of_unknown_length_ends_after_the_batch(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    module, train, val = (
        Validated(),
        torch.utils.data.DataLoader(torch.ones(2, 1)),
        torch.utils.data.DataLoader(Stream()),
    )
    with GracefulShutdown() as interrupts, pytest.raises(Interrupted, match="SIGTERM"):
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[interrupts],
            max_epochs=1,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(module, train, val)
    assert module.batches == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        (LOAD, 1, terminate),
        (STEP, 1, terminate),
        (STEP, 10, interrupt),
        (STEP, 20, interrupt),
        (VALIDATION, 1, interrupt),
    ]
    + [(SAVE, 1, terminate), (SAVE, 2, hang_up), (TEST, 1, requeue)],
    ids=["while data load", "first step", "last step of an epoch", "last step", "validation"]
    + ["first checkpoint", "last checkpoint", "test"],
)
def test_an_interrupted_run_is_resumed_to_the_same_end(fault: tuple, tmp_path: Path) -> None:
    assert run(tmp_path / "whole", *SMALL, OUT).end() == 0
    assert run(tmp_path / "stopped", *SMALL, OUT, faults=[fault]).end() > 128
    assert record(tmp_path / "stopped" / "out")["status"] == "interrupted"
    assert run(tmp_path / "stopped", "resume=out").end() == 0
    assert_alike(results(tmp_path / "stopped" / "out"), results(tmp_path / "whole" / "out"))


def test_a_second_ctrl_c_leaves_at_once_with_the_checkpoint_before_it_intact(tmp_path: Path) -> None:
    stopped = Run(tmp_path, *SMALL, OUT, faults=[(STEP, 14, interrupt_and_hang)])
    _wait_for(tmp_path / "hangs")
    time.sleep(0.4)  # a sooner signal counts as the same Ctrl-C, passed on by another process
    os.kill(stopped.process.pid, signal.SIGINT)
    began = time.monotonic()
    assert stopped.end() == 130
    assert time.monotonic() - began < PATIENCE_S / 2
    assert last(tmp_path / "out")["loop_state"]["steps"] == 10
    assert record(tmp_path / "out")["status"] == "interrupted"


def test_slurms_requeue_signal_asks_slurm_to_start_the_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/asked\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IEXEC)
    in_slurm = [("batchscope.training.run.train", 1, _InSlurm(str(scontrol.parent))), (STEP, 3, requeue)]
    assert run(tmp_path, *SMALL, OUT, faults=in_slurm).end() == 138
    assert (tmp_path / "asked").read_text() == "requeue 123\n"


class _InSlurm:
    """Sets a job's environment, with the program `scontrol` in `folder`."""

    def __init__(self, folder: str):
        self.folder = folder

    def __call__(self) -> None:
        os.environ |= {"SLURM_JOB_ID": "123", "PATH": f"{self.folder}:{os.environ['PATH']}"}


def _wait_for(path: Path) -> None:
    wait_until(path.exists, f"{path} never came")
