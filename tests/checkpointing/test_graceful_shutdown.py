"""On a termination signal a run finishes its step, saves a checkpoint, prints how to resume, and ends."""

import os
import signal
import stat
import time
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from batchscope.checkpointing.callback import Checkpoints
from batchscope.checkpointing.graceful_shutdown import GracefulShutdown
from batchscope.checkpointing.signals import STOPPING, forces_exit, handled_signals
from batchscope.errors import Interrupted
from tests.checkpointing.support import OUT, STEP, break_down, hang_up, interrupt, send, terminate
from tests.support.runs import EVERY_4, SMALL, Run, last, record, run
from tests.support.third_party_modules import Stranger, loader, train
from tests.support.waiting import PATIENCE_S, wait_until

TRAIN = "batchscope.training.run.train"
requeue = send(signal.SIGUSR1)


def ignore_hang_ups() -> None:
    """What nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def terminate_and_hang_up() -> None:
    """What systemd does, and when a terminal closes both the system and the shell send SIGHUP."""
    terminate()
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
    ("told", "name", "codes"),
    [
        (terminate, "SIGTERM", (143,)),
        # The tests of a terminal that closes, of a line that resumes, and of SLURM send the others.
        pytest.param(interrupt, "SIGINT", (130,), marks=pytest.mark.slow),
        pytest.param(hang_up, "SIGHUP", (129,), marks=pytest.mark.slow),
        pytest.param(requeue, "SIGUSR1", (138,), marks=pytest.mark.slow),
        pytest.param(terminate_and_hang_up, "SIG", (129, 143), marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_step_lets_it_finish_and_keeps_it(told, name, codes, tmp_path):
    stopped = run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, told)])
    assert stopped.end() in codes
    assert stopped.complained == ""
    stop, *how = stopped.said.splitlines()[-3:]
    assert stop.startswith(f"stopped by {name}")
    assert how == ["kept     out/checkpoints/last.ckpt", "resume   batchscope train resume=out"]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["global_step"] == 7


@pytest.mark.parametrize(
    ("step", "kept", "options"),
    [
        (6, "out/checkpoints/last.ckpt", []),
        (2, "no checkpoint: none was due yet", []),
        (6, "no checkpoint: trainer.enable_checkpointing is false", ["+trainer.enable_checkpointing=false"]),
        (6, "x/checkpoints/last.ckpt", ["callbacks.checkpoint.dirpath=null", "+trainer.default_root_dir=x"]),
    ],
)
def test_below_the_traceback_of_an_exception_stands_what_was_kept(step, kept, options, tmp_path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, OUT, *options, faults=[(STEP, step, break_down)])
    assert done.end() == 1
    assert "Traceback" in done.complained
    *said, how = done.complained.splitlines()[-4:]
    assert said == ["RuntimeError: the training broke", "", f"kept     {kept}"]
    assert how.startswith("resume   batchscope train resume=out")
    assert record(tmp_path / "out")["status"] == "failed"


def test_a_run_outlives_its_terminal_until_its_step_is_kept(tmp_path: Path) -> None:
    """Writing to a closed terminal is an error; the progress bar and the last lines do so."""
    with_bar = [word for word in SMALL if word != "callbacks.progress=null"]
    faults = [(TRAIN, 1, Terminal.open), (STEP, 7, Terminal.close)]
    stopped = run(tmp_path, *with_bar, "+callbacks.progress.interval_s=1e-9", OUT, faults=faults)
    assert stopped.end() == 129
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["global_step"] == 7


@pytest.mark.slow
def test_nohup_is_respected(tmp_path: Path) -> None:
    assert run(tmp_path, *SMALL, OUT, faults=[(TRAIN, 1, ignore_hang_ups), (STEP, 7, hang_up)]).end() == 0
    assert record(tmp_path / "out")["status"] == "finished"


def test_a_hang_up_is_heeded_unless_it_was_ignored_from_the_start() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert handled_signals() == list(STOPPING) == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert handled_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "seconds", "at_once"),
    [
        (signal.SIGINT, 0.1, False),  # one Ctrl-C, passed on by another process
        (signal.SIGINT, 0.4, True),
        (signal.SIGTERM, 0.4, True),
        (signal.SIGHUP, 0.4, False),
    ],
)
def test_a_second_signal_ends_a_run_at_once(number: int, seconds: float, at_once: bool) -> None:
    assert forces_exit(number, seconds) is at_once


def test_a_second_ctrl_c_leaves_at_once_with_the_checkpoint_before_it_intact(tmp_path: Path) -> None:
    stopped = Run(tmp_path, *SMALL, OUT, faults=[(STEP, 14, interrupt_and_hang)])
    wait_until((tmp_path / "hangs").exists, "the step never came")
    time.sleep(0.4)
    os.kill(stopped.process.pid, signal.SIGINT)
    began = time.monotonic()
    assert stopped.end() == 130
    assert time.monotonic() - began < PATIENCE_S / 2
    assert last(tmp_path / "out")["global_step"] == 10
    assert record(tmp_path / "out")["status"] == "interrupted"


def test_slurms_requeue_signal_asks_slurm_to_start_the_job_again(tmp_path: Path) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/asked\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IEXEC)
    in_slurm = {"SLURM_JOB_ID": "123", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    assert run(tmp_path, *SMALL, OUT, faults=[(STEP, 3, requeue)], environ=in_slurm).end() == 138
    assert (tmp_path / "asked").read_text() == "requeue 123\n"


class Validated(Stranger):
    """It gets SIGTERM in its second batch of validation."""

    batches: tuple[int, ...] = ()

    def validation_step(self, batch: object, batch_idx: int) -> None:
        self.batches += (batch_idx,)
        if batch_idx == 1:
            terminate()


def test_a_validation_ends_at_once() -> None:
    module = Validated()
    with GracefulShutdown() as shutdown, pytest.raises(Interrupted, match="SIGTERM"):
        train(module, shutdown, data=(loader(), loader()), num_sanity_val_steps=0)
    assert module.batches == (0, 1)


def test_a_signal_before_a_validation_waits_for_its_checkpoint(tmp_path: Path) -> None:
    signalled = LambdaCallback(on_validation_start=lambda *args: terminate())
    with GracefulShutdown() as shutdown, pytest.raises(Interrupted, match="SIGTERM"):
        how = {"val_check_interval": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
        train(Stranger(), signalled, shutdown, Checkpoints(str(tmp_path)), data=(loader(), loader()), **how)
    assert (tmp_path / "last.ckpt").exists()
