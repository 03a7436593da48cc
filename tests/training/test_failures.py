"""A run that cannot continue ends with one line that says why, and keeps what it had."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
import torch
from torch import optim
from torch._inductor.exc import CppCompileError

from batchscope.data.copy_memory import CopyMemory
from batchscope.errors import PeerLostError, UserError
from batchscope.files import WriteError
from batchscope.hardware.calibration import Calibration
from batchscope.training import failures
from batchscope.training.ending import explain_failures
from tests.checkpointing.support import OUT, STEP
from tests.support.runs import EVERY_4, SMALL, last, ranks, record, results, run

CPU = torch.device("cpu")


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
    assert last(tmp_path / "out")["global_step"] == 4


def test_a_run_may_skip_such_a_step_and_counts_it(tmp_path: Path) -> None:
    skip = "callbacks.nonfinite.action=skip"
    assert run(tmp_path, *SMALL, OUT, skip, faults=[(STEP, 6, break_one_loss)]).end() == 0
    assert record(tmp_path / "out")["skipped_steps"] == 1
    assert all(weight.isfinite().all() for weight in results(tmp_path / "out")["weights"].values())


def test_out_of_memory_is_told_with_the_batch_size_and_what_to_try(tmp_path: Path) -> None:
    counted = [option for option in SMALL if option != "callbacks.memory=null"]
    done = run(tmp_path, *counted, EVERY_4, OUT, faults=[(STEP, 6, ask_for_too_much)])
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: out of memory with data.batch_size=8 on cpu: ")
    assert " GiB were allocated of " in line
    assert "try data.batch_size=4 with trainer.accumulate_grad_batches=2" in line
    assert record(tmp_path / "out")["memory"]["parts_bytes"]["saved"] > 0
    assert record(tmp_path / "out")["status"] == "out_of_memory"
    assert last(tmp_path / "out")["global_step"] == 4


@pytest.mark.parametrize(("bf16", "recommended"), [(900e9, True), (16e9, False)], ids=["faster", "slower"])
def test_out_of_memory_recommends_a_precision_that_is_measured_to_be_faster(bf16, recommended, monkeypatch):
    measured = Calibration("cpu", "a processor", None, "2.15", 2, {"fp32": 100e9, "bf16": bf16})
    monkeypatch.setattr(failures, "cached_calibration", lambda device: measured)
    config = {"data": {"batch_size": 8}, "trainer": {"precision": "32-true"}}
    with pytest.raises(UserError) as error, explain_failures(config, CPU, first=True):
        raise MemoryError
    assert str(error.value).endswith(", or trainer.precision=bf16-mixed") == recommended


@pytest.mark.parametrize(("devices", "update", "batch", "smaller"), [("auto", 144, 48, 24), (4, 36, 9, 3)])
def test_out_of_memory_with_a_constant_update_names_a_batch_that_divides_it(devices, update, batch, smaller) -> None:
    config = {"data": {"batch_size": batch}, "trainer": {"devices": devices}, "global_batch_size": update}
    said = pytest.raises(UserError, match=f"try data.batch_size={smaller}(,|$)")
    with said, explain_failures(config, CPU, first=True):
        raise MemoryError


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
def test_out_of_memory_in_a_rank_that_is_not_the_first_is_how_the_run_ended(tmp_path: Path) -> None:
    assert all(one.end() for one in ranks(tmp_path, *SMALL, faults={1: [(STEP, 6, run_out_of_memory)]}))
    assert record(tmp_path / "out")["status"] == "out_of_memory"
    assert record(tmp_path / "out")["error"].startswith("out of memory with data.batch_size=8 on cpu: ")


# --- which exceptions are translated ----------------------------------------------------------------------------------

MLP = {"_target_": "batchscope.models.mlp.MLP"}
REFUSED = IsADirectoryError(errno.EISDIR, "Is a directory", "out/csv/metrics.csv")


def explained(error: BaseException, cause: BaseException | None = None, handled: BaseException | None = None) -> None:
    with explain_failures({"run_dir": "out", "compile": True, "model": MLP}, CPU, first=True):
        try:
            if handled is not None:
                raise handled
        except OSError:
            raise error  # noqa: B904
        raise error from cause


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left", "out/events"),
            "out/events cannot be written: the disk is full (No space",
        ),
        *(
            (OSError(number, os.strerror(number)), "out cannot be written: ") for number in (5, 116, 30)
        ),  # names no file
        (REFUSED, "out/csv/metrics.csv cannot be written: Is a directory"),
        (FileNotFoundError(errno.ENOENT, "No such file", b"out/events"), "out/events cannot be written: No such file"),
    ],
    ids=["a full disk", "EIO", "ESTALE", "EROFS", "a file of the run", "a run's folder that was removed"],
)
def test_a_file_that_the_system_refuses_is_one_line(error: OSError, line: str) -> None:
    for raised, cause in ((error, None), (ValueError("you tried to log 2.0"), error)):  # as Lightning has it
        with pytest.raises(WriteError, match=f"^{line.replace('(', '.')}"):
            explained(raised, cause)


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (torch.distributed.DistNetworkError("Broken pipe"), PeerLostError, "the connection to another process of the"),
        (torch.distributed.DistStoreError("Timed out"), PeerLostError, "the connection to another process of the run"),
        (RuntimeError("[pair.cc:561] Connection closed by peer [::1]:8857."), PeerLostError, "the connection to"),
        (RuntimeError("DataLoader worker (pid 7) is killed"), UserError, "data: DataLoader worker .pid 7. is killed; "),
        (
            CppCompileError(["g++"], "internal error"),
            UserError,
            "compile: true fails for MLP: C.. compile error; write ",
        ),
    ],
)
def test_what_a_library_says_is_translated(error: RuntimeError, kind: type[UserError], line: str) -> None:
    with pytest.raises(kind, match=f"^{line}"):
        explained(error)


@pytest.mark.parametrize(
    ("error", "handled"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "outside/file"), None),
        (OSError(errno.ESTALE, "Stale file handle", "outside/data.npy"), None),
        (FileNotFoundError(errno.ENOENT, "No such file", "out/a file that nobody wrote"), None),
        (ZeroDivisionError(), REFUSED),
    ],
    ids=["another file", "data that cannot be read", "a missing file", "a bug in dealing with a refused file"],
)
def test_a_bug_stays_a_bug(error: Exception, handled: OSError | None, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.lock").touch()
    with pytest.raises(type(error)):
        explained(error, handled=handled)


@pytest.mark.parametrize(
    ("kind", "trains"), [(optim.SGD, True), (optim.AdamW, False), (optim.NAdam, False), (optim.Adagrad, True)]
)
def test_an_optimizer_that_takes_no_sparse_gradients_is_told_with_one_that_does(kind, trains):
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = kind(table.parameters())
    table(torch.tensor([1, 1, 2])).sum().backward()
    advice = "write optimizer=adagrad without weight_decay, or give the model's embeddings sparse=False$"
    said = pytest.raises(UserError, match=f"^optimizer: .*sparse gradients.*; {advice}")
    with contextlib.nullcontext() if trains else said, explain_failures({"run_dir": "out"}, CPU, first=True):
        optimizer.step()


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
