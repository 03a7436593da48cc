"""TrainCurves writes what every training step returned at that step, in a stranger's project as in this one."""

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope.callbacks import curves
from batchscope.callbacks._timer import add_timer
from batchscope.callbacks.curves import TrainCurves
from tests.support.third_party_modules import Memory, Stranger, loader, train


class Returning(Stranger):
    """Returns its loss beside other values, or fails in a step."""

    def __init__(self, fails_at: int | None = None, **values: Any) -> None:
        super().__init__()
        self.fails_at, self.values = fails_at, values

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fails_at:
            raise ValueError("broken")
        return {"loss": super().training_step(batch, batch_idx) * 0 + 3, **self.values}


def curve(module: Any = None, every_n_steps: int | None = 1, **options: Any) -> list[tuple[int, dict[str, float]]]:
    memory = Memory()
    train(module or Stranger(), TrainCurves(every_n_steps), **{"logger": memory, **options})
    return memory.curve


STEPS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, list(range(1, 11))),
    ({"every_n_steps": 4}, [4, 8]),
    ({"every_n_steps": 0}, []),
    ({"data": loader(16), "accumulate_grad_batches": 2}, [1, 2, 3, 4]),
    ({"data": loader(125, 1)}, list(range(1, 251))),  # more than are read at once
]


@pytest.mark.parametrize(("options", "steps"), STEPS)
def test_every_step_is_written_at_its_own_place(options: dict[str, Any], steps: list[int]) -> None:
    found = curve(**options)
    assert [step for step, _ in found] == steps
    assert all(set(row) == {"train/loss"} for _, row in found)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_numbers_are_those_that_the_step_returned_and_what_is_no_real_number_is_no_curve(accumulate: int) -> None:
    values = {"acc": torch.tensor(0.5), "logits": torch.ones(4), "sparse": torch.ones(1).to_sparse()}
    module = Returning(**values, complex=torch.ones(1, dtype=torch.complex64))
    found = {(key, value) for _, row in curve(module, accumulate_grad_batches=accumulate) for key, value in row.items()}
    assert found == {("train/loss", 3.0), ("train/acc", 0.5)}


def test_an_accuracy_of_no_target_is_absent_and_a_loss_is_not() -> None:
    nan = torch.tensor(float("nan"))
    assert {key for _, row in curve(Returning(acc=nan, other=nan)) for key in row} == {"train/loss", "train/other"}


def test_each_fit_starts_a_curve() -> None:
    callback = TrainCurves()
    for _ in range(2):
        memory = Memory()
        train(Stranger(), callback, logger=memory)
        assert memory.steps("train/loss") == list(range(1, 11))


def test_a_module_that_returns_nothing_is_left_alone() -> None:
    class Silent(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    assert curve(Silent()) == []


def test_the_curve_reaches_the_step_before_a_failure() -> None:
    memory = Memory()
    with pytest.raises(ValueError, match="broken"):
        curve(Returning(fails_at=3), logger=memory)
    assert memory.steps("train/loss") == [1, 2, 3]


def test_a_rank_that_fails_writes_what_is_there_and_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Read:
        def __init__(self, is_ready: bool):
            self.is_ready = is_ready

        def ready(self) -> bool:
            return self.is_ready

        def values(self) -> list[float]:
            return [0.5] if self.is_ready else pytest.fail("waits for a collective operation that may never end")

    memory, callback = Memory(), TrainCurves()
    failing = lightning.Trainer(accelerator="cpu", logger=memory, enable_checkpointing=False)
    callback.on_train_start(failing, Stranger())
    callback._reads = [([(1, "loss")], Read(True)), ([(2, "loss")], Read(False))]
    monkeypatch.setattr(lightning.Trainer, "world_size", 2)
    callback.on_exception(failing, Stranger(), RuntimeError("a rank is gone"))
    assert memory.curve == [(1, {"train/loss": 0.5})]


def test_tensorboard_and_csv_hold_the_same_numbers(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, name="tb", version=""), CSVLogger(tmp_path, name="csv", version="")]
    curve(logger=loggers)
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("train/loss")
    header, *lines = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    csv = {int(r["step"]): float(r["train/loss"]) for r in rows if r["train/loss"]}
    assert {e.step: e.value for e in events} == pytest.approx(csv)
    assert sorted(csv) == list(range(1, 11))


def test_what_waits_for_the_device_on_mps_is_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Timer:
        @contextlib.contextmanager
        def pause(self, part_of_fit: bool) -> Iterator[None]:
            happened.append("excluded")
            yield
            happened.append("included")

    class Watched(curves.DeferredScalars):
        def __init__(self, *args: Any):
            happened.append("waits")
            super().__init__(*args)

    class Excluding(lightning.Callback):
        timer = Timer()

        def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            add_timer(trainer, self.timer)

    monkeypatch.setattr(curves, "DeferredScalars", Watched)
    monkeypatch.setattr(curves, "FLUSH_EVERY", 2)
    train(Stranger(), TrainCurves(), Excluding(), logger=Memory())
    before_waits = [before for before, now in itertools.pairwise(happened) if now == "waits"]
    assert before_waits and set(before_waits) == {"included"}


def test_the_mean_of_all_ranks_is_taken_without_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier has the host wait for its device."""
    others = torch.tensor([6.0, 4.0, 3.0, 1.0])  # the sums of three, of whom one has the second number
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.add_(others))
    monkeypatch.setattr(torch.distributed, "barrier", lambda *args, **kwargs: pytest.fail("a barrier"))
    means = curves._mean_of_ranks(torch.tensor([2.0, 0.0, 7.0]), has=[True, False])
    assert means.tolist() == [2.0, 4.0, 7.0]


def test_a_number_keeps_no_graph_until_it_is_read() -> None:
    class Kept(torch.autograd.Function):
        alive = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            Kept.alive += 1
            ctx.end = weakref.finalize(ctx, Kept.freed)
            return x.sum()

        @staticmethod
        def freed() -> None:
            Kept.alive -= 1

    class Measuring(Stranger):
        most = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.most = max(self.most, Kept.alive)
            return {"loss": super().training_step(batch, batch_idx), "mae": Kept.apply(self.layer(batch[0]))}

    module = Measuring()
    train(module, TrainCurves(), logger=Memory())
    assert module.most <= 2  # Lightning has the last one
