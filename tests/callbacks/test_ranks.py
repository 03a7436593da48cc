"""Two real ranks of strangers' modules: what they agree on, wait for, average and count."""

import json
import os
import socket
import time
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks import nonfinite
from batchscope.callbacks._measured import read_measured, write_measured
from batchscope.callbacks._report import report
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks.curves import TrainCurves
from batchscope.callbacks.target import StopAtTarget
from batchscope.callbacks.until_known import StopWhenKnown
from batchscope.errors import NonFiniteError
from tests.callbacks.support import monitoring, slow, stranger
from tests.callbacks.test_nonfinite import Breaking, Late
from tests.support.runs import Forked
from tests.support.third_party_modules import Memory, Stranger, loader, train
from tests.support.waiting import PATIENCE_S

DDP = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
SLOWER_MS = 40


def fit(module, *callbacks, **options):
    return train(module, *callbacks, **DDP | options)


class Different(Stranger):
    """Rank 0 returns `a`, and from the second step on `b`, too; rank 1 returns `c`, and in the first step `a`, too."""

    def training_step(self, batch, batch_idx: int):
        loss, number = super().training_step(batch, batch_idx), torch.tensor(self.global_rank + 1.0)
        if self.global_rank == 0:
            return {"loss": loss * 0, "a": number} | ({"b": number} if self.global_step else {})
        return {"c": number, "loss": loss * 0 + 1} | ({} if self.global_step else {"a": number})

    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("val/acc", self.global_step / 100 + self.global_rank)


def differ(folder):
    memory, stop = Memory(), StopAtTarget("val/acc", 0.5)
    options = {"max_steps": 400, "max_epochs": -1, "num_sanity_val_steps": 0, "accumulate_grad_batches": 2}
    options |= {"logger": memory, "use_distributed_sampler": True}
    trainer = fit(Different(), TrainCurves(), stop, data=(loader(), loader()), **options)
    return {"steps": trainer.global_step, "curve": [row for _, row in memory.rows if "train/loss" in row]}


def wait(folder, batches: int):
    module = stranger(training_step=lambda module: time.sleep(1e-3 * SLOWER_MS * module.global_rank))
    fit(module, monitor := monitoring(), data=loader(200), max_epochs=1, accumulate_grad_batches=batches)
    return monitor.summary | {"hooks": sum(len(p._post_accumulate_grad_hooks or {}) for p in module.parameters())}


class Sleeping(TensorDataset):
    """Each sample takes 10 ms on one rank."""

    def __init__(self, rank: int):
        super().__init__(*loader(160).dataset.tensors)
        self.sleeps = os.environ["RANK"] == str(rank)

    def __getitem__(self, index: int):
        time.sleep(0.25e-3 * SLOWER_MS * self.sleeps)
        return super().__getitem__(index)


def load(folder, rank: int, **before):
    """Train with a loader whose batches of four take 40 ms more on one rank."""
    fit(stranger(**before), monitor := monitoring(), data=DataLoader(Sleeping(rank), 4), max_epochs=1)
    rank_folder = folder / f"measured by {os.environ['RANK']}"
    rank_folder.mkdir(exist_ok=True)
    write_measured(rank_folder, monitor.measured, None)
    replayed, _ = read_measured(rank_folder)
    return monitor.summary | {"replayed": report(replayed, None)["slow_rank"]}


def time_up(folder):
    monitor = monitoring()
    trainer = fit(slow(), monitor, StopWhenKnown(precision=1e-6, seconds=0.5), max_epochs=-1, min_epochs=0)
    return {"steps": trainer.global_step, "ended": monitor.summary.get("ended")}


def give_up(folder):
    add = UpdateTable.add if os.environ["RANK"] == "0" else Mock(side_effect=RuntimeError)
    with patch.object(UpdateTable, "add", add):
        fit(Stranger(), monitor := monitoring())
    return monitor.summary


def measure_few(folder):
    fit(Stranger(), monitor := monitoring(), max_steps=5)
    return monitor.summary


def break_off(folder):
    """The gradients of step 3 are NaN. Flags are read late."""
    with patch.object(nonfinite, "READ_EVERY", {"cpu": 2}):
        try:
            fit(module := Breaking(3, where="gradient"), Late(), data=loader(200), max_epochs=1)
        except NonFiniteError as error:
            return {"steps": len(module.weights), "said": str(error).partition(" (")[0]}
    return {}


SCENARIOS = {
    "differ": differ,
    "wait": lambda folder: wait(folder, 1),
    "wait, accumulated": lambda folder: wait(folder, 3),
    "load": lambda folder: load(folder, 1),
    "load, with a training step that waits": lambda folder: load(
        folder, 0, training_step=lambda module: torch.distributed.barrier()
    ),
    "time up": time_up,
    "give up": give_up,
    "few": measure_few,
    "break off": break_off,
}


def run_rank(folder, rank: int, port: int) -> None:
    """Run every scenario as one of two ranks, as torchrun starts them, and write the results."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    torch.set_num_threads(1)
    results = {name: scenario(folder) for name, scenario in SCENARIOS.items()}
    (folder / str(rank)).write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    """The results of both ranks, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [Forked.start(run_rank, folder, rank, port) for rank in (0, 1)]
    assert [process.end(PATIENCE_S) for process in processes] == [0, 0]
    first, second = (json.loads((folder / str(rank)).read_text()) for rank in (0, 1))
    return {name: [first[name], second[name]] for name in first}


@pytest.mark.slow
class TestTwoRanks:
    def test_that_differ_agree_on_what_is_averaged_counted_and_ended(self, results) -> None:
        first, second = results["differ"]
        first_row = {"train/loss": 0.5, "train/a": 1.5}
        assert first["curve"][:2] == [first_row, {"train/loss": 0.5, "train/a": 1.0, "train/b": 1.0}]
        assert first["steps"] == second["steps"] < 400

    @pytest.mark.parametrize("scenario", ["wait", "wait, accumulated"])
    def test_of_which_the_faster_waits_for_the_slower_which_waits_for_nobody(self, scenario: str, results) -> None:
        faster, slower = results[scenario]
        assert faster["communication_ms"] > 0.8 * SLOWER_MS
        assert slower["communication_ms"] < faster["communication_ms"] - 0.5 * SLOWER_MS
        assert faster["hooks"] == slower["hooks"] == 0
        for summary in results[scenario]:
            assert (summary["slow_rank"]["rank"], summary["slow_rank"]["part"]) == (1, "compute")
            assert summary["slow_rank"]["excess_ms"] > 0.5 * SLOWER_MS
            assert "advice" not in summary["bottleneck"] or summary["bottleneck"]["kind"] != "communication"

    @pytest.mark.parametrize(
        ("scenario", "rank", "certainty"),
        [
            ("load", 1, "clear"),
            ("load, with a training step that waits", 0, "probable"),
        ],
    )
    def test_of_which_one_has_a_slow_loader_name_it(self, scenario: str, rank: int, certainty: str, results) -> None:
        for summary in results[scenario]:
            slow = summary["slow_rank"]
            assert (slow["rank"], slow["part"], slow["certainty"]) == (rank, "input", certainty)
            assert slow["ms"] > slow["excess_ms"] > 0.8 * SLOWER_MS
            assert summary["ranks_ms"]["input"][rank] == slow["ms"]
            assert summary["replayed"] == slow

    def test_end_after_the_same_step_when_the_time_is_up(self, results) -> None:
        first, second = results["time up"]
        assert first["ended"] == "time limit" and first["steps"] == second["steps"] > 5

    def test_of_which_one_gives_up_measuring_keep_each_other_not_waiting(self, results) -> None:
        assert results["give up"][0]["missing"]["bottleneck"].endswith("or another rank has stopped measuring")

    def test_of_few_steps_say_so(self, results) -> None:
        reason = "of 5 updates none came after the warm-up of 5"
        assert results["few"] == [{"missing": {"bottleneck": reason}}] * 2

    def test_break_off_in_the_same_step_for_a_gradient_that_is_not_finite(self, results) -> None:
        assert results["break off"] == [{"steps": 6, "said": "step 3"}] * 2
