"""TrainCurves writes what every training step returned, at the number of that step, in any Lightning project."""

import weakref

import pytest
import torch

from batchscope.callbacks import curves
from batchscope.callbacks._deferred_scalars import DeferredScalars
from batchscope.callbacks.curves import TrainCurves
from tests.support.third_party_modules import Memory, Stranger, loader, train


class Returning(Stranger):
    """A module whose step returns a loss of 3 with other values, or returns nothing."""

    def __init__(self, returns: bool = True, **values) -> None:
        super().__init__()
        self.returns, self.values = returns, values

    def training_step(self, batch, batch_idx: int):
        loss = super().training_step(batch, batch_idx) * 0 + 3
        return {"loss": loss, **self.values} if self.returns else None


class OfOneSample(Returning):
    def training_step(self, batch, batch_idx: int):
        return super().training_step(batch, batch_idx)["loss"].reshape(1)


NAN = torch.tensor(float("nan"))
ODD = {
    "logits": torch.ones(4),
    "preds": torch.ones(1),
    "sparse": torch.ones(1).to_sparse(),
    "complex": torch.ones(1, dtype=torch.complex64),
}


@pytest.mark.parametrize(
    ("module", "every", "options", "steps", "values"),
    [
        (Returning(), 1, {}, range(1, 11), {"loss": 3}),
        (Returning(), 4, {}, [4, 8], {"loss": 3}),
        (Returning(), 0, {}, [], {}),
        (Returning(), 1, {"data": loader(16), "accumulate_grad_batches": 2}, range(1, 5), {"loss": 3}),
        (Returning(), 1, {"data": loader(60, 1)}, range(1, 121), {"loss": 3}),
        (Returning(acc=torch.tensor(0.5), **ODD), 1, {}, range(1, 11), {"loss": 3, "acc": 0.5}),
        (Returning(acc=0.5, hits=3, right=True), 1, {}, range(1, 11), {"loss": 3, "acc": 0.5, "hits": 3}),
        (Returning(acc=NAN, other=NAN), 1, {}, range(1, 11), {"loss": 3, "other": pytest.approx(NAN, nan_ok=True)}),
        (Returning(False), 1, {}, [], {}),
        (OfOneSample(), 1, {"data": loader(10, 1)}, range(1, 21), {"loss": 3}),
    ],
    ids=[
        *("every step", "every fourth", "none", "accumulated", "more than are read at once"),
        *(
            "what is no real number",
            "numbers of Python",
            "an accuracy of no target",
            "a module that returns nothing",
            "a loss of a sample",
        ),
    ],
)
def test_every_step_is_written_at_its_own_place(module, every, options, steps, values) -> None:
    train(module, TrainCurves(every), logger=(memory := Memory()), **options)
    assert [step for step, _ in memory.curve] == [step for step in steps for _ in values]
    assert memory.curve[: len(values)] == [(steps[0], {f"train/{key}": value}) for key, value in values.items()]


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({"on_step": False, "on_epoch": True}, [4]),
        ({"on_step": True}, [2]),
        ({"on_step": True, "on_epoch": True}, [1, 2, 3, 4, 5]),  # Lightning logs train/loss_step and train/loss_epoch
        ({"logger": False}, [1, 2, 3, 4, 5]),
    ],
)
def test_a_key_that_the_module_logs_itself_has_its_values_alone(how: dict, steps: list[int]) -> None:
    class Logging(Stranger):
        def training_step(self, batch, batch_idx: int):
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, **how)
            return loss

    train(Logging(), TrainCurves(), logger=(memory := Memory()), max_epochs=1, log_every_n_steps=3)
    assert memory.steps("train/loss") == steps


def test_a_mean_that_a_module_logs_at_the_end_of_an_epoch_takes_no_step_from_the_curve() -> None:
    class Means(Stranger):
        def on_train_epoch_end(self) -> None:
            self.log("train/loss", torch.zeros(()))

    train(Means(), TrainCurves(), logger=(memory := Memory()), max_epochs=2)
    assert memory.steps("train/loss") == [*range(1, 6), 4, *range(6, 11), 9]


def test_a_scalar_on_the_cpu_beside_the_devices_own_is_read_with_them() -> None:
    scalars = [torch.ones((), device="meta"), torch.tensor([2.0]), torch.tensor(3, dtype=torch.int64)]
    reads = []
    for order in (scalars, scalars[::-1]):
        DeferredScalars(order, lambda values: reads.append((str(values.device), len(values))) or torch.zeros(3))
    assert reads == [("meta", 3)] * 2


@pytest.mark.parametrize("tokens", [123456789, torch.tensor(123456789), torch.tensor(123456789.0, dtype=torch.float64)])
def test_a_large_number_is_not_rounded(tokens) -> None:
    train(Returning(tokens=tokens), TrainCurves(), logger=(memory := Memory()), max_steps=2)
    assert memory.values("train/tokens") == [123456789, 123456789]


def test_the_mean_of_all_ranks_is_taken_without_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier has the host wait for its device, which two real ranks (test_ranks.py) do not show."""
    others = torch.tensor([6.0, 4.0, 3.0, 1.0])  # the sums of three ranks, of which one has the second number
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.add_(others))
    monkeypatch.setattr(torch.distributed, "barrier", lambda *args, **kwargs: pytest.fail("a barrier"))
    means = curves._mean_of_ranks(torch.tensor([2.0, 0.0, 7.0]), [True, False], torch.device("cpu"))
    assert means.tolist() == [2.0, 4.0, 7.0]


def test_numbers_of_the_host_are_averaged_on_the_device_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL alone can."""
    reads = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: reads.append(str(values.device)))
    curves._mean_of_ranks(torch.tensor([2.0, 7.0]), [True], torch.device("meta"))
    assert reads == ["meta"]


def test_an_average_that_each_step_updates_in_place_is_written_as_each_step_left_it() -> None:
    class Averaging(Stranger):
        def training_step(self, batch, batch_idx: int):
            self.steps = torch.zeros(()) if self.global_step == 0 else self.steps
            return {"loss": super().training_step(batch, batch_idx), "steps": self.steps.add_(1)}

    train(Averaging(), TrainCurves(), logger=(memory := Memory()))
    assert memory.values("train/steps") == [float(step) for step in range(1, 11)]


def test_a_number_keeps_no_graph_until_it_is_read() -> None:
    graphs = []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            graphs.append(weakref.ref(ctx))
            return x.sum()

    class Measuring(Stranger):
        def training_step(self, batch, batch_idx: int):
            assert sum(graph() is not None for graph in graphs) <= 2  # Lightning keeps the last graph
            return {"loss": super().training_step(batch, batch_idx), "mae": Kept.apply(self.layer(batch[0]))}

    train(Measuring(), TrainCurves(), logger=Memory())
    assert len(graphs) == 10
