"""A run that is told to end finishes its step, keeps a checkpoint, says how to go on, and ends."""

import os
import signal
import stat
import time
from pathlib import Path

import pytest
from runs import SMALL, Run, assert_alike, last, record, results, run

OUT = "hydra.run.dir=out"
STEP, VALIDATION, TEST = (f"batchscope.task.Task.{kind}_step" for kind in ("training", "validation", "test"))
LOAD = "batchscope.data.copy_memory.CopyMemory.load"


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def requeue() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def interrupt_and_hang() -> None:
    """Ctrl-C in a step that does not end."""
    interrupt()
    Path("hangs").touch()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("told", "name", "code"), [(terminate, "SIGTERM", 143), (interrupt, "SIGINT", 130), (requeue, "SIGUSR1", 138)]
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
    assert last(tmp_path / "out")["position"]["steps"] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [(LOAD, 1, terminate), (STEP, 1, terminate), (STEP, 10, interrupt), (VALIDATION, 1, interrupt), (TEST, 1, requeue)],
    ids=["while data load", "first step", "last step of an epoch", "validation", "test"],
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
    time.sleep(0.4)  # as fast as people press it again; what comes sooner is the same Ctrl-C by another way
    os.kill(stopped.process.pid, signal.SIGINT)
    began = time.monotonic()
    assert stopped.end() == 130
    assert time.monotonic() - began < 5
    assert last(tmp_path / "out")["position"]["steps"] == 10
    assert record(tmp_path / "out")["status"] == "interrupted"


def test_slurms_requeue_signal_asks_slurm_to_start_the_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/asked\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IEXEC)
    in_slurm = [("batchscope.train.train", 1, _InSlurm(str(scontrol.parent))), (STEP, 3, requeue)]
    assert run(tmp_path, *SMALL, OUT, faults=in_slurm).end() == 138
    assert (tmp_path / "asked").read_text() == "requeue 123\n"


class _InSlurm:
    """A job's environment; the program `scontrol` lies in `folder`."""

    def __init__(self, folder: str):
        self.folder = folder

    def __call__(self) -> None:
        os.environ |= {"SLURM_JOB_ID": "123", "PATH": f"{self.folder}:{os.environ['PATH']}"}


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)
