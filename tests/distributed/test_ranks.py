"""Two real ranks on this machine's CPU: they train as one process would, agree, and end together."""

from pathlib import Path

import pytest
import torch

from tests.checkpointing.support import STEP, TEST, VALIDATION, break_down, other_data, terminate
from tests.checkpointing.test_exact_resume import SHORT  # four batches an epoch
from tests.support.runs import Fault, Run, last, ranks, record, results, run


def end(both: list[Run]) -> list[int]:
    """Wait for both ranks, and return their exit codes. Neither may print a traceback."""
    codes = [process.end() for process in both]
    assert "Traceback" not in "".join(process.complained for process in both), [process.complained for process in both]
    return codes


# --- what they train -------------------------------------------------------------------------------------------------

# 21 samples in batches of 8: two ranks cannot share evenly the 5 samples of the last batch, nor the 3 of the
# validation.
UNEVEN = [
    *("data=adding", "data.num_train=21", "data.num_val=3", "data.num_test=17", "data.sequence_length=8"),
    *("model=rnn_cell", "model.hidden_size=8", "optimizer=sgd", "trainer.max_epochs=2", "callbacks.device=null"),
    *("callbacks.throughput=null", "callbacks.progress=null"),
    "trainer.accelerator=cpu",
]


@pytest.mark.slow
@pytest.mark.parametrize("option", [f"data.pipeline={pipeline}" for pipeline in ("memory", "device", "workers")])
def test_two_processes_train_and_measure_what_one_does_with_twice_the_batch(option: str, tmp_path: Path) -> None:
    """Weights, losses and metrics agree up to the rounding of sums in another order."""
    run(tmp_path / "alone", *UNEVEN, "data.batch_size=8", "hydra.run.dir=out", code=0)
    assert end(ranks(tmp_path, *UNEVEN, "data.batch_size=4", option)) == [0, 0]
    actual, expected = results(tmp_path / "out"), results(tmp_path / "alone/out")
    assert actual["steps"] == expected["steps"] == 6
    torch.testing.assert_close(actual["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
    assert expected["metrics"].keys() == {"val/loss", "test/loss"}
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-6, abs=1e-7)
    for key, steps in expected["curves"].items():
        assert actual["curves"][key] == [(step, pytest.approx(value, rel=1e-5, abs=1e-6)) for step, value in steps]
    evaluated = run(tmp_path, "ckpt=out/checkpoints/best.ckpt", module="batchscope.cli.evaluate")
    assert float(evaluated.said.split()[-1]) == pytest.approx(expected["metrics"]["test/loss"], abs=2e-6)


# --- what they have to agree on --------------------------------------------------------------------------------------

FEW = "trainer.devices: 2 processes, and copy-memory has 1 training samples"
SETUP = "batchscope.data.datamodule.TensorDataModule.setup"


# An option, the call of set-up at which the data of rank 1 change, and the beginning of the one error line.
@pytest.mark.parametrize(
    ("option", "changed_at", "reason", "is_recorded"),
    [
        ("seed=0", 1, "dataset.fingerprint: is '0123456789abcdef' in process 1, and ", True),
        pytest.param("data.num_train=1", 0, FEW, False, marks=pytest.mark.slow),
    ],
)
def test_what_ranks_cannot_train_or_do_not_agree_on_is_one_line(
    option, changed_at, reason, is_recorded, tmp_path
) -> None:
    both = ranks(tmp_path, *SHORT, option, faults={1: [(SETUP, changed_at, other_data)]})
    assert all(end(both))
    lines = [line for process in both for line in process.complained.splitlines()]
    (line,) = {line.replace("error: process 1: ", "error: ") for line in lines if "error: " in line}
    assert line.startswith(f"error: {reason}")
    if is_recorded:
        assert record(tmp_path / "out")["status"] == "failed"
    else:
        assert not (tmp_path / "out" / "run.json").exists()


def test_the_first_one_decides_with_which_options_all_train_and_a_test_that_they_cannot_share_is_left_out(
    tmp_path: Path,
) -> None:
    few = ["data.num_test=1", "data.num_val=1", "trainer.limit_val_batches=0", "trainer.max_epochs=1"]
    both = ranks(tmp_path, *SHORT, *few, "optimizer.lr=0.1{rank}")
    assert end(both) == [0, 0]
    assert record(tmp_path / "out")["status"] == "finished"
    warning = "warning: test: 2 processes cannot share 1 test sample of copy-memory; write batchscope evaluate ckpt="
    assert warning in both[0].complained
    assert record(tmp_path / "out")["config"]["optimizer"]["lr"] == 0.1


# --- how they end ----------------------------------------------------------------------------------------------------

LONG = ["trainer.max_epochs=1000", "+trainer.check_val_every_n_epoch=1000"]
MANY = 2 * 256 * 10  # samples; ten batches on each rank
# Options, the fault of the rank that gets the signal, and the possible steps of the last checkpoint.
MOMENTS: dict[str, tuple[list[str], Fault, tuple[int, ...]]] = {
    "a step": (LONG, (STEP, 7, terminate), (7, 8, 9)),
    "a validation": ([f"data.num_val={MANY}"], (VALIDATION, 3, terminate), (4, 5, 6)),
    "a test": ([f"data.num_test={MANY}", "trainer.max_epochs=1"], (TEST, 3, terminate), (4,)),
}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("moment", [pytest.param(m, marks=[pytest.mark.slow] * (m != "a step")) for m in MOMENTS])
def test_a_signal_to_one_rank_ends_both_after_the_same_step(moment: str, rank: int, tmp_path: Path) -> None:
    options, fault, steps = MOMENTS[moment]
    both = ranks(tmp_path, *SHORT, *options, faults={rank: [fault]})
    assert end(both) == [143, 143]
    assert record(tmp_path / "out")["status"] == "interrupted"
    assert last(tmp_path / "out")["global_step"] in steps
    assert [process.said.count("stopped by SIGTERM") for process in both] == [1, 0]


@pytest.mark.slow
def test_what_ends_one_rank_is_how_the_run_ended(tmp_path: Path) -> None:
    both = ranks(tmp_path, *SHORT, faults={1: [(STEP, 3, break_down)]})
    assert [process.end() for process in both] == [1, 1]
    run_record = record(tmp_path / "out")
    assert (run_record["status"], run_record["error"]) == ("failed", "RuntimeError: the training broke")


@pytest.mark.slow
def test_the_first_rank_alone_looks_for_the_record_of_an_earlier_run(tmp_path: Path) -> None:
    """A shared file system caches for a while that a file is missing."""
    reads = ("batchscope.records.run_record.read", 1, break_down)
    assert end(ranks(tmp_path, *SHORT, "trainer.max_epochs=1", faults={1: [reads]})) == [0, 0]


def note_broadcasts() -> None:
    """Record every later broadcast."""
    torch.distributed.broadcast = lambda *args, **kwargs: Path("broadcast").touch()


@pytest.mark.slow
def test_lightning_does_not_ask_the_ranks_of_a_signal_before_every_batch(tmp_path: Path) -> None:
    """Lightning's broadcast runs on the device, and waits for the device."""
    both = ranks(tmp_path, *SHORT, "trainer.max_epochs=1", faults={1: [(STEP, 2, note_broadcasts)]})
    assert end(both) == [0, 0]
    assert not (tmp_path / "1" / "broadcast").exists()
