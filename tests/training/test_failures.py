"""A run that cannot continue ends with one line that says why, and keeps what it had."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from batchscope.data.copy_memory import CopyMemory
from batchscope.errors import PeerLostError, UserError
from batchscope.files import WriteError
from batchscope.hardware.calibration import Calibration
from batchscope.training import failures as ending
from batchscope.training.failures import explain_failures
from batchscope.training.optimizer import SGD, Adagrad, AdamW, NAdam, Optimizer
from tests.support.runs import EVERY_4, SMALL, last, record, results, run
from tests.support.waiting import PATIENCE_S

OUT = "hydra.run.dir=out"
STEP = "batchscope.training.task.Task.training_step"


def break_one_loss() -> None:
    """The next loss is not a number."""
    from batchscope.training.task import Task

    inner = Task.loss

    def broken(self: Task, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        Task.loss = inner
        return inner(self, output, y) * float("nan")

    Task.loss = broken


def ask_for_too_much() -> None:
    torch.empty(10**15)


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, EVERY_4, OUT, faults=[(STEP, 6, break_one_loss)])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: step 6: the loss is nan, the gradient of model.")
    samples = line.split("batch 5 of epoch 0 (samples ")[1].split("), learning rate ")[0]
    assert len(samples.split(", ")) == 8
    assert record(tmp_path / "out")["status"] == "failed"
    assert record(tmp_path / "out")["error"] == line.removeprefix("error: ")
    assert last(tmp_path / "out")["loop_state"]["steps"] == 4


def test_a_run_may_skip_such_a_step_and_counts_it(tmp_path: Path) -> None:
    skip = "callbacks.nonfinite.action=skip"
    assert run(tmp_path, *SMALL, OUT, skip, faults=[(STEP, 6, break_one_loss)]).end() == 0
    assert record(tmp_path / "out")["skipped_steps"] == 1
    assert all(weight.isfinite().all() for weight in results(tmp_path / "out")["weights"].values())


@pytest.mark.parametrize(
    ("recipe", "trains"),
    [(SGD(), False), (AdamW(), False), (NAdam(), False), (Adagrad(weight_decay=0.1), False), (Adagrad(), True)],
    ids=lambda value: type(value).__name__,
)
def test_an_optimizer_that_takes_no_sparse_gradients_is_told_with_one_that_does(
    recipe: Optimizer, trains: bool
) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = recipe.build(table.parameters())
    table(torch.tensor([1, 1, 2])).sum().backward()
    advice = "write optimizer=adagrad without weight_decay, or give the model's embeddings sparse=False$"
    told = (
        contextlib.nullcontext()
        if trains
        else pytest.raises(UserError, match=f"^optimizer: .*sparse gradients.*; {advice}")
    )
    with told, explain_failures({"run_dir": "out"}, torch.device("cpu"), first=True):
        optimizer.step()


def test_out_of_memory_is_told_with_the_batch_size_and_what_to_try(tmp_path: Path) -> None:
    counted = [option for option in SMALL if option != "callbacks.memory=null"]
    done = run(tmp_path, *counted, EVERY_4, OUT, faults=[(STEP, 6, ask_for_too_much)])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: out of memory with data.batch_size=8 on cpu: ")
    assert " GiB were allocated of " in line
    assert "; a step before held " in line and " of it saved by autograd; try " in line
    assert "try data.batch_size=4 with trainer.accumulate_grad_batches=2" in line
    assert record(tmp_path / "out")["memory"]["parts_bytes"]["saved"] > 0
    assert record(tmp_path / "out")["status"] == "out_of_memory"
    assert last(tmp_path / "out")["loop_state"]["steps"] == 4


@pytest.mark.parametrize(
    ("bf16", "recommended"), [(900e9, True), (16e9, False)], ids=["faster in bf16", "slower in bf16"]
)
def test_out_of_memory_recommends_a_precision_that_is_measured_to_be_faster(
    bf16: float, recommended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Calibration("cpu", "a processor", None, "2.15", 2, {"fp32": 100e9, "bf16": bf16})
    monkeypatch.setattr(ending, "cached_calibration", lambda device: measured)
    config = {"data": {"batch_size": 8}, "trainer": {"precision": "32-true"}}
    with pytest.raises(UserError) as error, explain_failures(config, torch.device("cpu"), first=True):
        raise MemoryError
    assert str(error.value).endswith(", or trainer.precision=bf16-mixed") == recommended


GIB = 2**30
PARTS = {"parameters": GIB, "gradients": GIB, "saved": 30 * GIB}


@pytest.mark.parametrize(
    ("parts", "batch_size", "advice"),
    [
        ({}, 64, "of 16.00; try data.batch_size=32 with trainer.accumulate_grad_batches=2"),
        (
            PARTS,
            64,
            (
                "; a step before held 32 GiB, 30 GiB of it saved by autograd; try data.batch_size=32 with "
                "trainer.accumulate_grad_batches=2"
            ),
        ),
        (PARTS, 1, " of it saved by autograd; try a smaller model"),
    ],
)
def test_out_of_memory_on_a_gpu_says_what_a_step_held(
    parts: dict[str, int], batch_size: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "cached_calibration", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * GIB))
    config = {"data": {"batch_size": batch_size}, "trainer": {}}
    with (
        pytest.raises(UserError) as error,
        explain_failures(config, torch.device("cuda"), first=True, memory=lambda: {"parts_bytes": parts}),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    assert str(error.value).startswith(f"out of memory with data.batch_size={batch_size} on cuda: 10.00 GiB were ")
    assert str(error.value).endswith(advice)


OUT_OF_MEMORY_IN_THE_SECOND = """
import os, torch
from batchscope.training.task import Task
from batchscope.train import main

inner, steps = Task.training_step, []

def step(self, *args):
    steps.append(1)
    if os.environ.get("LOCAL_RANK") == "1" and len(steps) == 6:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return inner(self, *args)

Task.training_step = step
main()
"""


@pytest.mark.slow
def test_out_of_memory_in_a_process_that_is_not_the_first_is_how_the_run_ended(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(OUT_OF_MEMORY_IN_THE_SECOND)
    line = [sys.executable, str(program), *SMALL, OUT, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0
    assert record(tmp_path / "out")["status"] == "out_of_memory"
    assert record(tmp_path / "out")["error"].startswith("out of memory with data.batch_size=8 on cpu: ")


@pytest.mark.parametrize("wrapped", [False, True], ids=["by itself", "in another error, as Lightning has it"])
def test_a_full_disk_is_one_line_with_the_file(wrapped: bool) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "out/events")
    with (
        pytest.raises(WriteError, match=r"^out/events cannot be written: the disk is full \(No space left"),
        explain_failures({"run_dir": "out"}, torch.device("cpu"), first=True),
    ):
        if wrapped:
            raise ValueError("you tried to log 2.0") from full
        raise full


REFUSED = IsADirectoryError(errno.EISDIR, "Is a directory", "out/csv/metrics.csv")


def explained(error: BaseException, cause: BaseException | None = None, handled: BaseException | None = None) -> None:
    with explain_failures({"run_dir": "out"}, torch.device("cpu"), first=True):
        try:
            if handled is not None:
                raise handled
        except OSError:
            raise error  # noqa: B904
        raise error from cause


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_file_system_that_is_gone_is_one_line_though_it_names_no_file(number: int) -> None:
    with pytest.raises(WriteError, match="^out cannot be written: "):
        explained(OSError(number, os.strerror(number)))


def test_a_file_of_the_run_that_is_refused_is_one_line() -> None:
    with pytest.raises(WriteError, match=r"^out/csv/metrics\.csv cannot be written: Is a directory$"):
        explained(REFUSED)
    with pytest.raises(WriteError):
        explained(ValueError("you tried to log 2.0"), cause=REFUSED)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "outside/file"),
        FileNotFoundError(errno.ENOENT, "No such file", "out/a file that nobody wrote"),
    ],
)
def test_any_other_file_is_no_reason_to_hide_where_an_error_is_from(error: OSError) -> None:
    with pytest.raises(type(error)):
        explained(error)


def test_a_bug_in_dealing_with_a_refused_file_stays_a_bug() -> None:
    with pytest.raises(ZeroDivisionError):
        explained(ZeroDivisionError(), handled=REFUSED)


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistNetworkError("Broken pipe"),
        torch.distributed.DistStoreError("Timed out"),
        RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:8857."),
    ],
)
def test_a_process_that_has_gone_is_one_line_in_the_others(error: RuntimeError) -> None:
    with pytest.raises(PeerLostError, match="^the connection to another process of the run is lost"):
        explained(error)


def test_a_label_that_is_no_class_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data = CopyMemory(num_train=16, num_val=4, num_test=4)
    inner = data.load

    def with_a_wrong_label(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = inner(split)
        if split == "val":
            y[2, 3] = 77
        return x, y

    monkeypatch.setattr(data, "load", with_a_wrong_label)
    with pytest.raises(UserError, match="sample 2 of copy-memory's val split has the label 77, and the classes are 0 "):
        data.setup("fit")
