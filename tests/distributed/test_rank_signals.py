"""A signal to any rank ends all ranks after the same step."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.runs import SMALL, Run, assert_alike, last, ranks, record, results

STEP, VALIDATION, TEST = (f"batchscope.training.task.Task.{kind}_step" for kind in ("training", "validation", "test"))
LOAD = "batchscope.data.copy_memory.CopyMemory.load"
SAVE = "batchscope.checkpointing.callback.Checkpoints.save"
# Four batches an epoch: 64 samples, 8 in each of two processes.
SHORT = [word.replace("data.num_train=76", "data.num_train=64") for word in SMALL]
LONG = [*SHORT, "trainer.max_epochs=1000", "+trainer.check_val_every_n_epoch=1000"]
MANY = 2 * 256 * 10  # samples; ten batches on each rank


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def go_on() -> None:
    Path("went-on").touch()


def end(both: list[Run]) -> list[int]:
    """Wait for both; their exit codes. Neither may print a traceback."""
    codes = [one.end() for one in both]
    assert "Traceback" not in "".join(one.complained for one in both), [one.complained for one in both]
    return codes


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_rank_ends_both_also_in_epochs_of_four_batches(rank: int, tmp_path: Path) -> None:
    both = ranks(tmp_path, *LONG, faults={rank: [(STEP, 7, terminate)]})
    assert end(both) == [143, 143]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["loop_state"]["steps"] in (7, 8, 9)
    assert both[0].said.count("stopped by SIGTERM") == 1
    assert "stopped by" not in both[1].said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_while_ranks_connect_is_one_line_in_the_other(rank: int, tmp_path: Path) -> None:
    setup = "batchscope.distributed.agreement.Agreement.setup"
    both = ranks(tmp_path, *SHORT, faults={rank: [(setup, 1, terminate)]})
    codes = end(both)
    assert (codes[rank], codes[1 - rank]) == (143, 1)
    (line,) = both[1 - rank].complained.splitlines()
    assert line.endswith("the connection to another process of the run is lost, and the run ends")
    assert record(tmp_path / "out")["status"] == "interrupted"


def note_broadcasts() -> None:
    """Note every broadcast from now on."""
    torch.distributed.broadcast = lambda *args, **kwargs: Path("broadcast").touch()


@pytest.mark.slow
def test_lightning_does_not_ask_the_ranks_of_a_signal_before_every_batch(tmp_path: Path) -> None:
    """Its broadcast runs on the device, and waits for it."""
    both = ranks(tmp_path, *SHORT, "trainer.max_epochs=1", faults={1: [(STEP, 2, note_broadcasts)]})
    assert end(both) == [0, 0]
    assert not (tmp_path / "1" / "broadcast").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_in_a_validation_ends_both_before_it_is_over(rank: int, tmp_path: Path) -> None:
    both = ranks(
        tmp_path,
        *SHORT,
        f"data.num_val={MANY}",
        faults={rank: [(VALIDATION, 3, terminate), (VALIDATION, 6, go_on)]},
    )
    assert end(both) == [143, 143]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["loop_state"]["steps"] == 4
    assert not (tmp_path / str(rank) / "went-on").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_in_a_test_ends_both_before_it_is_over(rank: int, tmp_path: Path) -> None:
    both = ranks(
        tmp_path,
        *SHORT,
        f"data.num_test={MANY}",
        "trainer.max_epochs=1",
        faults={rank: [(TEST, 3, terminate), (TEST, 6, go_on)]},
    )
    assert end(both) == [143, 143]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert not (tmp_path / str(rank) / "went-on").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "count"),
    [(STEP, 1), (STEP, 4), (STEP, 8), (VALIDATION, 2), (SAVE, 1), (SAVE, 2)],
    ids=["first step", "last step of an epoch", "last step", "last validation", "first checkpoint", "last checkpoint"],
)
def test_a_run_of_two_ranks_is_resumed_to_the_same_end(
    rank: int, what: str, count: int, tmp_path: Path, unstopped: Path
) -> None:
    assert end(ranks(tmp_path, *SHORT, faults={rank: [(what, count, terminate)]})) == [143, 143]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert end(ranks(tmp_path, f"resume={tmp_path / 'out'}")) == [0, 0]
    assert_alike(results(tmp_path / "out"), results(unstopped))


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unstopped")
    assert end(ranks(folder, *SHORT)) == [0, 0]
    return folder / "out"
