"""On a termination signal a run finishes its step, saves a checkpoint, prints how to resume, and ends."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from batchscope.checkpointing.callback import Checkpoints
from batchscope.checkpointing.graceful_shutdown import GracefulShutdown
from batchscope.checkpointing.signals import exit_on_signals, forces_exit, handled_signals
from batchscope.errors import Interrupted
from tests.checkpointing.support import OUT, STEP, break_down, hang_up, interrupt, send, terminate
from tests.support.marks import LINUX, POSIX
from tests.support.runs import EVERY_4, SMALL, Run, last, record, run
from tests.support.systems import SYSTEM
from tests.support.third_party_modules import Stranger, loader, train
from tests.support.waiting import PATIENCE_S, wait_until

TERMINAL: list[int] = []


def open_terminal() -> None:
    """Start a session with a terminal of its own for this process."""
    master, slave = os.openpty()
    TERMINAL.append(master)
    os.login_tty(slave)


def close_terminal() -> None:
    """Close the terminal: the system sends SIGHUP, and later writes to the terminal fail."""
    os.close(TERMINAL.pop())


def lose_reader() -> None:
    """Replace standard output by a pipe without a reader."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)


@pytest.mark.parametrize(
    ("told", "name", "code"),
    [
        (terminate, "SIGTERM", 143),
        pytest.param(send(signal.SIGUSR1), "SIGUSR1", 138, marks=POSIX),
        # Other default tests send these signals: to get a resume line, and by a closed terminal.
        pytest.param(interrupt, "SIGINT", 130, marks=pytest.mark.slow),
        pytest.param(hang_up, "SIGHUP", 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_step_lets_it_finish_and_keeps_it(told, name, code, tmp_path):
    """SIGUSR1 is SLURM's; by its code docs/train.sbatch asks SLURM to start the job again."""
    stopped = run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, told)], code=code)
    assert stopped.complained == ""
    stop, *advice = [line for line in stopped.said.splitlines() if line.startswith(("stopped", "kept", "resume"))]
    assert stop.startswith(f"stopped by {name}")
    assert advice == ["kept     out/checkpoints/last.ckpt", "resume   batchscope train resume=out"]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["global_step"] == 7


EACH = "callbacks.checkpoint.every_minutes=1e-9"


@pytest.mark.parametrize(
    ("step", "kept", "options"),
    [
        (4, "out/checkpoints/last.ckpt", [EACH]),
        (6, "no checkpoint", ["callbacks.checkpoint=null"]),
        pytest.param(2, "no checkpoint", [], marks=pytest.mark.slow),
        pytest.param(6, "no checkpoint", ["+trainer.enable_checkpointing=false"], marks=pytest.mark.slow),
    ],
)
def test_below_the_traceback_of_an_exception_stands_what_was_kept(step, kept, options, tmp_path) -> None:
    failed = run(tmp_path, *SMALL, EVERY_4, OUT, *options, faults=[(STEP, step, break_down)], code=1)
    assert "Traceback" in failed.complained
    *error, advice = failed.complained.splitlines()[-4:]
    assert error == ["RuntimeError: the training broke", "", f"kept     {kept}"]
    label = "restart" if kept.startswith("no checkpoint") else "resume "
    assert advice.startswith(f"{label}  batchscope train resume=out")
    assert record(tmp_path / "out")["status"] == "failed"
    assert options != [EACH] or last(tmp_path / "out")["global_step"] == 3


class Counting(Stranger):
    """Counts each finished batch, and receives a signal in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ended", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            terminate()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended += 1


def test_what_a_module_does_after_its_step_is_kept_with_the_step(tmp_path: Path) -> None:
    module = Counting()
    with GracefulShutdown() as shutdown, pytest.raises(Interrupted, match="SIGTERM"):
        train(module, shutdown, Checkpoints(), enable_checkpointing=True, default_root_dir=tmp_path)
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["state_dict"]["ended"] == 2


def test_a_run_is_interrupted_although_nobody_reads_what_it_says_any_more(tmp_path: Path) -> None:
    """Ctrl-C also ends the `tee` that reads the output of a run."""
    run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, lose_reader), (STEP, 7, interrupt)], code=130)
    assert record(tmp_path / "out")["status"] == "interrupted"


@POSIX
def test_a_run_outlives_its_terminal_until_its_step_is_kept(tmp_path: Path) -> None:
    """The progress bar and the last lines write to the closed terminal, which is an error."""
    with_bar = [word for word in SMALL if word != "callbacks.progress=null"]
    faults = [("batchscope.training.run.train", 1, open_terminal), (STEP, 7, close_terminal)]
    run(tmp_path, *with_bar, "+callbacks.progress.interval_s=1e-9", OUT, faults=faults, code=129)
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["global_step"] == 7


@POSIX
def test_a_hang_up_is_heeded_unless_nohup_ignores_it_from_the_start() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        for ignored in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, ignored)
            heeded = [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (ignored is signal.SIG_DFL)
            assert handled_signals() == heeded
            with GracefulShutdown():
                assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is (ignored is signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_run_has_a_way_to_stop_interrupts_this_process_alone() -> None:
    before = {number: signal.getsignal(number) for number in handled_signals()}
    try:
        exit_on_signals()
        with pytest.raises(Interrupted, match="^stopped by SIGTERM$") as stopped:
            terminate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (stopped.value.code, stopped.value.agreed) == (143, False)


def test_a_second_signal_ends_a_run_at_once_unless_it_is_the_first_one_passed_on() -> None:
    assert forces_exit(signal.SIGINT, 0.4) and forces_exit(signal.SIGTERM, 0.4)
    assert not forces_exit(signal.SIGINT, 0.2)
    assert not forces_exit(signal.SIGHUP, 0.4) or SYSTEM == "windows"  # Windows has no such signal


def begin_and_sleep(begun: Any) -> None:
    begun.send(True)
    time.sleep(10)


@LINUX
def test_a_forked_process_leaves_signals_to_the_run_and_ends_at_sigterm() -> None:
    """`Pool.terminate` sends SIGTERM to its workers."""
    fork = multiprocessing.get_context("fork")
    parent_end, child_end = fork.Pipe()
    with GracefulShutdown():
        forked = fork.Process(target=begin_and_sleep, args=[child_end])
        forked.start()
        parent_end.recv()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(forked.pid or 0, number)
        forked.join()
    assert forked.exitcode == -signal.SIGTERM


def interrupt_and_hang() -> None:
    """Ctrl-C in a step that does not end."""
    interrupt()
    Path("hangs").touch()
    time.sleep(PATIENCE_S)


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


@pytest.mark.parametrize(("hook", "number"), [("on_validation_start", 1), ("on_validation_batch_start", 2)])
def test_a_validation_ends_at_once_and_keeps_the_checkpoint_before_it(hook: str, number: int, tmp_path: Path) -> None:
    """A signal at the start of a validation waits for the checkpoint that is due."""
    begun = Mock(side_effect=lambda *_: begun.call_count == number and terminate())
    with GracefulShutdown() as shutdown, pytest.raises(Interrupted, match="SIGTERM"):
        options = {
            "val_check_interval": 2,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": True,
            "default_root_dir": tmp_path,
        }
        callbacks = (LambdaCallback(**{hook: begun}), shutdown, Checkpoints())
        train(Stranger(), *callbacks, data=(loader(), loader()), **options)
    assert begun.call_count == number
    assert (tmp_path / "checkpoints/last.ckpt").exists()


@pytest.mark.parametrize(("told", "name", "code"), [(interrupt, "SIGINT", 130), (terminate, "SIGTERM", 143)])
def test_a_signal_before_a_run_has_begun_leaves_no_folder_and_says_so(told, name, code, tmp_path):
    stopped = run(tmp_path, *SMALL, OUT, faults=[("batchscope.training.run.quiet_libraries", 1, told)], code=code)
    assert stopped.complained == f"stopped by {name}: the run had not begun\n"
    assert not (tmp_path / "out").exists()
