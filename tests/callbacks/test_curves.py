"""TrainCurves writes what every training step returned at that step, in a stranger's project as in this one."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from batchscope.callbacks import curves, throughput
from batchscope.callbacks._timer import add_timer
from batchscope.callbacks.curves import TrainCurves
from tests.support.third_party_modules import Memory, Stranger, loader


def trainer(tmp_path: Path, logger: Any, **options: Any) -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=logger, max_epochs=2, **quiet, **options
    )


def test_every_step_is_written_at_its_own_place(tmp_path: Path) -> None:
    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves()]).fit(Stranger(), loader())
    assert [step for step, _ in memory.curve] == list(range(1, 11))
    assert all(set(row) == {"train/loss"} for _, row in memory.curve)


def test_the_numbers_are_those_of_the_steps(tmp_path: Path) -> None:
    class Counting(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            extra = torch.tensor(float(self.global_step))
            return {"loss": super().training_step(batch, batch_idx), "acc": extra, "logits": batch[0]}

    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves()]).fit(Counting(), loader())
    assert [(s, r["train/acc"]) for s, r in memory.curve if "train/acc" in r] == [(i + 1, float(i)) for i in range(10)]
    assert not any("train/logits" in row for _, row in memory.curve)


def test_every_nth_step(tmp_path: Path) -> None:
    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves(every_n_steps=4)]).fit(Stranger(), loader())
    assert [step for step, _ in memory.curve] == [4, 8]


def test_accumulated_gradients_make_one_point_an_update(tmp_path: Path) -> None:
    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves()], accumulate_grad_batches=2).fit(Stranger(), loader(16))
    assert [step for step, _ in memory.curve] == [1, 2, 3, 4]


@pytest.mark.slow
def test_more_steps_than_a_bunch(tmp_path: Path) -> None:
    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves()]).fit(Stranger(), loader(samples=250, batch_size=1))
    assert [step for step, _ in memory.curve] == list(range(1, 501))


def test_fitting_twice_with_one_callback_starts_a_curve_each_time(tmp_path: Path) -> None:
    curves = TrainCurves()
    for _ in range(2):
        memory = Memory()
        trainer(tmp_path, memory, callbacks=[curves]).fit(Stranger(), loader())
        assert [step for step, _ in memory.curve] == list(range(1, 11))


def test_the_curve_reaches_the_step_before_a_failure(tmp_path: Path) -> None:
    class Failing(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    memory = Memory()
    with pytest.raises(ValueError, match="broken"):
        trainer(tmp_path, memory, callbacks=[TrainCurves()]).fit(Failing(), loader())
    assert [step for step, _ in memory.curve] == [1, 2, 3]


def test_a_rank_that_fails_writes_what_is_there_and_waits_for_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Read:
        def __init__(self, is_ready: bool):
            self.is_ready = is_ready

        def ready(self) -> bool:
            return self.is_ready

        def values(self) -> list[float]:
            return [0.5] if self.is_ready else pytest.fail("waits for a collective operation that may never end")

    memory, callback = Memory(), TrainCurves()
    failing = trainer(tmp_path, memory)
    callback.on_train_start(failing, Stranger())
    callback._reads = [([(1, "loss")], Read(True)), ([(2, "loss")], Read(False))]
    monkeypatch.setattr(lightning.Trainer, "world_size", 2)
    callback.on_exception(failing, Stranger(), RuntimeError("a rank is gone"))
    assert memory.curve == [(1, {"train/loss": 0.5})]


def test_a_module_that_returns_nothing_is_left_alone(tmp_path: Path) -> None:
    class Silent(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves()]).fit(Silent(), loader())
    assert memory.curve == []


def test_tensorboard_and_csv_hold_the_same_numbers(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, name="tb", version=""), CSVLogger(tmp_path, name="csv", version="")]
    trainer(tmp_path, loggers, callbacks=[TrainCurves()]).fit(Stranger(), loader())
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("train/loss")
    header, *lines = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    csv = {int(r["step"]): float(r["train/loss"]) for r in rows if r["train/loss"]}
    assert {e.step: e.value for e in events} == pytest.approx(csv)
    assert sorted(csv) == list(range(1, 11))


@pytest.mark.slow
def test_writing_lengthens_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Memory):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            time.sleep(0.02)
            super().log_metrics(metrics, step)

    for module in (curves, throughput):
        monkeypatch.setattr(module, "FLUSH_EVERY", 20)
    memory, monitor = Slow(), throughput.ThroughputMonitor(calibrate=False, verbose=False)
    callbacks = [TrainCurves(), monitor]
    trainer(tmp_path, memory, callbacks=callbacks).fit(Stranger(), loader(samples=60, batch_size=1))
    steps = [row["time/step_ms"] for _, row in memory.rows if "time/step_ms" in row]
    assert len(steps) > 100 and max(steps) < 400  # writing 20 steps takes 400 ms
    assert monitor.summary["excluded_ms"] > 20
    assert monitor.summary["fit_seconds"] > 240 * 0.02 > monitor.summary["seconds"]
    assert monitor.summary["samples_per_sec_fit"] == pytest.approx(120 / monitor.summary["fit_seconds"])


def test_what_waits_for_the_device_on_mps_is_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Timer:
        @contextlib.contextmanager
        def pause(self, part_of_fit: bool) -> Iterator[None]:
            happened.append("excluded")
            yield
            happened.append("included")

    timer = Timer()

    class Watched(curves.DeferredScalars):
        def __init__(self, *args: Any):
            happened.append("waits")
            super().__init__(*args)

    class Excluding(lightning.Callback):
        def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            add_timer(trainer, timer)

    monkeypatch.setattr(curves, "DeferredScalars", Watched)
    monkeypatch.setattr(curves, "FLUSH_EVERY", 2)
    trainer(tmp_path, Memory(), callbacks=[TrainCurves(), Excluding()]).fit(Stranger(), loader())
    before_waits = [before for before, now in itertools.pairwise(happened) if now == "waits"]
    assert before_waits and set(before_waits) == {"included"}


def test_the_mean_of_all_ranks_is_taken_without_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier has the host wait for its device."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.add_(6))  # of the three others
        monkeypatch.setattr(torch.distributed, "barrier", lambda *args, **kwargs: pytest.fail("a barrier"))
        assert curves._mean_of_all_ranks(torch.tensor([2.0, 10.0])).tolist() == [2.0, 4.0]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_loss_is_the_one_that_the_step_returned_also_where_gradients_are_accumulated(
    tmp_path: Path, accumulate: int
) -> None:
    class Constant(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 0 + 3

    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves()], accumulate_grad_batches=accumulate).fit(Constant(), loader())
    assert set(memory.values("train/loss")) == {3.0}


def test_what_is_no_dense_real_number_is_no_curve(tmp_path: Path) -> None:
    class Odd(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "sparse": torch.ones(1).to_sparse(), "complex": torch.ones(1, dtype=torch.complex64)}

    memory = Memory()
    trainer(tmp_path, memory, callbacks=[TrainCurves()]).fit(Odd(), loader())
    assert {key for _, row in memory.rows for key in row} - {"epoch"} == {"train/loss"}
