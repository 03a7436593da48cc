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
from batchscope.callbacks._deferred_scalars import DeferredScalars
from batchscope.callbacks._timer import add_timer
from batchscope.callbacks.curves import TrainCurves
from tests.support.third_party_modules import Memory, Stranger, loader, train


class Returning(Stranger):
    """Returns its loss, which is 3, beside other values, or nothing."""

    def __init__(self, returns: bool = True, **values: Any) -> None:
        super().__init__()
        self.returns, self.values = returns, values

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * 0 + 3
        return {"loss": loss, **self.values} if self.returns else None


NAN = torch.tensor(float("nan"))
ODD = {"logits": torch.ones(4), "sparse": torch.ones(1).to_sparse(), "complex": torch.ones(1, dtype=torch.complex64)}


@pytest.mark.parametrize(
    ("module", "every", "options", "steps", "values"),
    [
        (Returning(), 1, {}, range(1, 11), {"loss": 3}),
        (Returning(), 4, {}, [4, 8], {"loss": 3}),
        (Returning(), 0, {}, [], {}),
        (Returning(), 1, {"data": loader(16), "accumulate_grad_batches": 2}, range(1, 5), {"loss": 3}),
        (Returning(), 1, {"data": loader(60, 1)}, range(1, 121), {"loss": 3}),
        (Returning(acc=torch.tensor(0.5), **ODD), 1, {}, range(1, 11), {"loss": 3, "acc": 0.5}),
        (Returning(acc=NAN, other=NAN), 1, {}, range(1, 11), {"loss": 3, "other": pytest.approx(NAN, nan_ok=True)}),
        (Returning(False), 1, {}, [], {}),
    ],
    ids=[
        *("every step", "every fourth", "none", "accumulated", "more than are read at once"),
        *("what is no real number", "an accuracy of no target", "a module that returns nothing"),
    ],
)
def test_every_step_is_written_at_its_own_place(
    module: Any, every: int, options: dict[str, Any], steps: Any, values: dict[str, float]
) -> None:
    train(module, TrainCurves(every), logger=(memory := Memory()), **options)
    assert [step for step, _ in memory.curve] == [step for step in steps for _ in values]
    assert memory.curve[: len(values)] == [(steps[0], {f"train/{key}": value}) for key, value in values.items()]


def test_tensorboard_and_csv_hold_the_same_numbers(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, name="tb", version=""), CSVLogger(tmp_path, name="csv", version="")]
    train(Stranger(), TrainCurves(), logger=loggers)
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("train/loss")
    header, *lines = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    csv = {int(r["step"]): float(r["train/loss"]) for r in rows if r["train/loss"]}
    assert {e.step: e.value for e in events} == pytest.approx(csv)
    assert sorted(csv) == list(range(1, 11))


def test_a_rank_that_fails_writes_what_is_there_and_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In real ranks nobody can tell what is ready, so the numbers on their way are the test's own."""

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


def test_what_waits_for_the_device_on_mps_is_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Watched(DeferredScalars):
        def __init__(self, *args: Any):
            happened.append("waits")
            super().__init__(*args)

    class Excluding(lightning.Callback):
        """A timer of the trainer."""

        @contextlib.contextmanager
        def pause(self, part_of_fit: bool) -> Iterator[None]:
            happened.append("excluded")
            yield
            happened.append("included")

        def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            add_timer(trainer, self)

    monkeypatch.setattr(curves, "DeferredScalars", Watched)
    monkeypatch.setattr(curves, "FLUSH_EVERY", 2)
    train(Stranger(), TrainCurves(), Excluding(), logger=Memory())
    before_waits = [before for before, now in itertools.pairwise(happened) if now == "waits"]
    assert before_waits and set(before_waits) == {"included"}


def test_a_scalar_on_the_cpu_beside_the_devices_own_is_read_with_them() -> None:
    scalars = [torch.ones((), device="meta"), torch.tensor([2.0]), torch.tensor(3, dtype=torch.int64)]
    seen: list[tuple[str, int]] = []
    for order in (scalars, scalars[::-1]):
        DeferredScalars(order, lambda values: seen.append((str(values.device), len(values))) or torch.zeros(3))
    assert seen == [("meta", 3)] * 2


def test_the_mean_of_all_ranks_is_taken_without_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier has the host wait for its device, which two real ranks (test_ranks.py) do not show."""
    others = torch.tensor([6.0, 4.0, 3.0, 1.0])  # the sums of three, of whom one has the second number
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.add_(others))
    monkeypatch.setattr(torch.distributed, "barrier", lambda *args, **kwargs: pytest.fail("a barrier"))
    means = curves._mean_of_ranks(torch.tensor([2.0, 0.0, 7.0]), has=[True, False])
    assert means.tolist() == [2.0, 4.0, 7.0]


def test_a_number_keeps_no_graph_until_it_is_read() -> None:
    graphs: list[weakref.ref] = []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            graphs.append(weakref.ref(ctx))
            return x.sum()

    class Measuring(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert sum(graph() is not None for graph in graphs) <= 2  # Lightning has the last one
            return {"loss": super().training_step(batch, batch_idx), "mae": Kept.apply(self.layer(batch[0]))}

    train(Measuring(), TrainCurves(), logger=Memory())
    assert len(graphs) == 10
