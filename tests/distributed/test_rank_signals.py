"""A signal to any rank ends all ranks after the same step."""

import signal
from pathlib import Path

import pytest
import torch

from tests.checkpointing.support import STEP, TEST, VALIDATION, send
from tests.checkpointing.test_exact_resume import SHORT  # four batches an epoch
from tests.support.runs import Run, last, ranks, record

terminate = send(signal.SIGTERM)
LONG = ["trainer.max_epochs=1000", "+trainer.check_val_every_n_epoch=1000"]
MANY = 2 * 256 * 10  # samples; ten batches on each rank


def end(both: list[Run]) -> list[int]:
    """Wait for both; their exit codes. Neither may print a traceback."""
    codes = [one.end() for one in both]
    assert "Traceback" not in "".join(one.complained for one in both), [one.complained for one in both]
    return codes


# Options, the faults of the rank that gets the signal, and after how many steps the last checkpoint may be.
MOMENTS = {
    "a step": (LONG, [(STEP, 7, terminate)], (7, 8, 9)),
    "a validation": ([f"data.num_val={MANY}"], [(VALIDATION, 3, terminate)], (4, 5, 6)),
    "a test": ([f"data.num_test={MANY}", "trainer.max_epochs=1"], [(TEST, 3, terminate)], (4,)),
}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("moment", [pytest.param(m, marks=[pytest.mark.slow] * (m != "a step")) for m in MOMENTS])
def test_a_signal_to_one_rank_ends_both(moment: str, rank: int, tmp_path: Path) -> None:
    options, faults, steps = MOMENTS[moment]
    both = ranks(tmp_path, *SHORT, *options, faults={rank: faults})
    assert end(both) == [143, 143]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["global_step"] in steps
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
